"""OpenAI's protocol in front of any graph; importing this needs the extra `penstock[serving]`."""

from importlib.util import find_spec as _find_spec

from .._errors import MissingExtraError
from .._public import public as _public

if None in map(_find_spec, ("starlette", "pydantic", "httpx")):
    raise MissingExtraError("penstock.serving needs Starlette, pydantic and httpx: pip install 'penstock[serving]'")

from .answers import Delta
from .application import Application, openai
from .protocol import APIError, Request, UpstreamError
from .replicas import Breaker, Replica
from .upstreams import Upstream, engine, upstream

__all__ = [
    "APIError", "Application", "Breaker", "Delta", "Replica", "Request", "Upstream", "UpstreamError", "engine",
    "openai", "upstream",
]  # fmt: skip

__getattr__, __dir__ = _public(__name__)
