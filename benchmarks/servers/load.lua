-- What wrk sends, and what it says at the end: one line of JSON.
wrk.method = "POST"
wrk.body = '{"input": 4.0}'
wrk.headers["Content-Type"] = "application/json"

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %.6f, "p50_seconds": %.6f, "p99_seconds": %.6f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    e.connect + e.read + e.write + e.status + e.timeout))
end
