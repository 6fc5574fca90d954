"""A gateway in OpenAI's protocol in front of two model servers; the second server takes over when the first fails.

    export UPSTREAMS="http://10.0.0.1:8000/v1 http://10.0.0.2:8000/v1" MODEL=Qwen/Qwen3-8B
    export KEYS='{"sk-one": ["one", 60000], "sk-two": ["two", 600]}'          # names, and tokens a minute
    uvicorn --app-dir examples --factory gateway:create_app --timeout-graceful-shutdown 60

Clients use the gateway like OpenAI: chats, completions, responses, streamed and whole. Before an answer begins, the
gateway sends a second request to a slow server, repeats the request to a busy server after the time that it names, and
then tries the other server. If all of that fails, the client gets an error. A client that leaves ends all its work, and
pays for the tokens that it got.
"""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import penstock as ps
from penstock import serving

PLACES = 256  # calls in flight
POLICY: dict[str, Any] = {
    "hedge": ps.Hedge(after_seconds=5),
    "retry": ps.Retry(2, wait=ps.retry_after, max_backoff_seconds=2, retry_on=serving.UpstreamError),
}
BREAKER = serving.Breaker(failures=10, seconds=5)


def guess(request: serving.Request) -> float:
    """Return an estimate of the tokens of a request; the server tells the true number later."""
    return len(json.dumps(request.body)) / 4


def create_app() -> serving.Application:
    """Make the application."""
    keys: dict[str, tuple[str, int]] = json.loads(os.environ["KEYS"])
    quotas = dict(keys.values())
    first, second = (serving.upstream(url, breaker=BREAKER) for url in os.environ["UPSTREAMS"].split())
    model = first.chat.with_policy(**POLICY, failover=second.chat.with_policy(**POLICY))
    limit = ps.RateLimit(
        per_second=lambda caller: quotas[caller] / 60, burst=1000, on_limit="refuse", scope="engine",
        key=lambda request: request.caller, cost=guess,
    )  # fmt: skip

    @ps.node
    async def counted(parts: AsyncIterator[serving.Delta], request: serving.Request) -> AsyncIterator[serving.Delta]:
        used = 0.0
        try:
            async for part in parts:
                used = part.usage["total_tokens"] if part.usage else (used or guess(request)) + 1
                yield part
        finally:
            limit.settle(request.caller, used - guess(request))

    @ps.graph
    async def complete(messages: list[dict[str, Any]], request: serving.Request) -> AsyncIterator[serving.Delta]:
        allowed = await limit(request)
        return counted(model(messages, allowed), allowed)

    return serving.openai(
        {os.environ["MODEL"]: complete}, api_keys={key: name for key, (name, _) in keys.items()},
        parts=[first, second], max_in_flight=PLACES, max_in_flight_per_key=64, max_queue=256, max_queue_per_key=64,
        timeout_seconds=300,
    )  # fmt: skip
