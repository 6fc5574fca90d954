-- Calls, calls whose deadline is too short for some, and streams, in turns; every connection takes the next of them.
local requests, turn = {}, 0

init = function(args)
  for _, path in ipairs(args) do
    requests[#requests + 1] = wrk.format("GET", path)
  end
end

request = function()
  turn = turn + 1
  return requests[turn % #requests + 1]
end
