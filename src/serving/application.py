"""The application: any graph as a model, behind OpenAI's protocol."""

import asyncio
import hmac
import inspect
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from contextvars import ContextVar
from functools import cached_property
from hashlib import sha256
from traceback import format_exception
from typing import Any, Final, Literal, Self, TypedDict, Unpack, cast

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import Graph, asgi, engine, graph
from .._errors import EngineClosedError, GraphTraceError, OptionsError, Overloaded, retry_after_header
from ..actors.accepted import check, whole
from ..telemetry import logs
from .answers import Answer, Completion, Embeddings, as_json
from .measures import MALFORMED, measured
from .protocol import NAME, APIError, Base, ChatRequest, CompletionRequest, EmbeddingsRequest, Request, error_of, parsed
from .responses import Response as ResponsesAnswer
from .responses import ResponsesRequest
from .upstreams import Upstream, can_be_asked, upstreams_of

# The name of the API key of the request that is handled now, for a deployment whose graph takes only messages.
_caller: ContextVar[str | None] = ContextVar("penstock_serving_caller", default=None)

_BODY_SECONDS: Final = 30.0  # the same limit as for a client that stalls while it reads an answer
_MAX_BODY_BYTES: Final = 32 << 20  # some images in base64


class DeployOptions(TypedDict, total=False):
    """Options of the deployment that `openai` makes; `penstock.engine.deploy` describes each option."""

    max_in_flight: int
    max_queue: int | None
    timeout_seconds: float | None
    weights: Mapping[str, float]
    max_in_flight_per_key: int
    max_queue_per_key: int
    warmup: bool


class _NoEvent:
    """The type of events to read from a call whose events are dropped: no node emits an object of this type."""


class _LoggedError(APIError):
    """An error for the client, in the place of an error that is in the log."""


class _Model:
    """A graph that is served under a name."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.upstreams = upstreams_of(given)
        self.service: Any = cast("Any", given) if isinstance(given, engine.Service) else None
        made: Any = cast("Any", given) if self.service is None else self.service.graphs[0]
        made = given.chat if isinstance(given, Upstream) else made
        try:
            self.graph: Graph[..., Any] = made if isinstance(made, Graph) else graph(made)
        except (TypeError, GraphTraceError) as error:
            raise OptionsError(f"serving.openai({{{name!r}: {given!r}}}): {error}") from error
        self.parameters = [*inspect.signature(self.graph).parameters]
        self.is_embeddings = len(self.parameters) == 1 and self.parameters[0] not in ("messages", "request")
        if not self.is_embeddings and not {"messages", "request"}.issuperset(self.parameters):
            raise OptionsError(
                f"serving.openai: graph {self.graph.name!r} of model {name!r} takes {', '.join(self.parameters)}; it "
                "has to take messages, request, or both; and a model for embeddings takes one text"
            )

    @cached_property
    def gives_stream(self) -> bool:
        """Whether the graph gives a stream; known once the graph is deployed."""
        call = self.graph(*(None for _ in self.parameters))
        return bool(self.service.stream(call, events=_NoEvent).gives_values)

    @property
    def state(self) -> str:
        """The state of its deployment; "down" if that is ready, but no server of its upstreams looks well."""
        state = "starting" if self.service is None else self.service.state
        return "down" if state == "ready" and self.upstreams and not any(map(can_be_asked, self.upstreams)) else state

    def call(self, request: Base) -> Any:
        """Return the call for a request; for embeddings, a list with a call for each text.

        Raises:
            APIError: the model does not serve this kind of request, or cannot honour a field.
        """
        if not self.upstreams:
            if isinstance(request, EmbeddingsRequest) is not self.is_embeddings:
                kind = "a model for embeddings" if self.is_embeddings else "no model for embeddings"
                raise APIError(400, f"model: {self.name!r} is {kind}", "model")
            for name, is_set, is_for_graph in request._changes():
                if is_set and not (is_for_graph and "request" in self.parameters):
                    text = f"{name}: the model {self.name!r} cannot honour this"
                    raise APIError(400, text, name, "unsupported_value")
            if isinstance(request, EmbeddingsRequest):
                return [self.graph(text) for text in request._texts]
        given = {"messages": request._messages(), "request": request}
        return self.graph(**{name: given[name] for name in self.parameters})


class Application(Starlette):
    """An ASGI application that serves models; made by `openai`.

    A server can run the application as it is. An application that mounts it has to enter it as an async context
    manager, since servers do not tell mounted applications of the start:
    `FastAPI(lifespan=asgi.lifespan(application))`.
    """

    def __init__(
        self, models: Mapping[str, Any], api_keys: Collection[str] | Mapping[str, str] | None,
        parts: Iterable[AbstractAsyncContextManager[Any]], events: Literal["comments", "drop"], trace_content: bool,
        max_body_bytes: int, options: DeployOptions,
    ) -> None:  # fmt: skip
        self._models = {name: _Model(name, given) for name, given in models.items()}
        self._keys = None if api_keys is None else _digests(api_keys)
        self._events, self._traces_content, self._max_body_bytes = events, trace_content, max_body_bytes
        self._stack = AsyncExitStack()
        own = [*dict.fromkeys(model.graph for model in self._models.values() if model.service is None)]
        if options and not own:
            raise OptionsError(
                f"serving.openai({next(iter(options))}=...): all models are services, which have options of their own: "
                "give it to engine.deploy"
            )
        given: Any = {**options} if self._keys is None else {"key": _key, **options}
        together = engine.Engine()
        self._service = together.deploy(*own, **given) if own else None
        bound = (getattr(one, "bound_to", one) for one in models.values())  # an upstream, also from its bound node
        upstreams = (one for one in bound if isinstance(one, Upstream))
        self._parts: list[Any] = [*dict.fromkeys((together, *upstreams, *parts)), *([self._service] if own else [])]
        super().__init__(
            routes=[
                *(Route(path, self._told, methods=["POST"]) for path in _ANSWERS),  # so that GET is 405
                Route("/metrics", self._metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route("/openapi.json", JSONResponse(document()), methods=["GET"]),
                Route("/health/live", JSONResponse({"status": "ok"}), methods=["GET"]),
                Route("/health/ready", self._ready),
            ],
            exception_handlers=cast("Any", dict.fromkeys((APIError, HTTPException, Exception), self._told)),
            lifespan=cast("Any", asgi.lifespan(self)),
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. Answers of models bypass middleware, which would take longer than a token."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in _ANSWERS:
            await super().__call__(scope, receive, send)
            return
        http = HTTPRequest(scope, receive)
        try:
            await self._answer(http, *_ANSWERS[path], send)
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)
        except Exception as error:
            response = await self._told(http, error)
            await response(scope, receive, send)
            if response.status_code == 500 and not isinstance(error, _LoggedError):
                raise  # the server logs it

    async def __aenter__(self) -> Self:
        """Start the deployment of the models.

        Raises:
            Exception: a graph cannot be deployed, or a part cannot be entered.
        """
        async with AsyncExitStack() as stack:
            for part in self._parts:
                await stack.enter_async_context(part)
            for model in self._models.values():
                model.service = model.service or self._service
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Drain the deployment: calls that have begun get their whole answers."""
        await self._stack.__aexit__(*error)

    # --- requests

    async def _asked(self, kind: type[Base], request: HTTPRequest) -> Base:
        """Return the request of a client that has a key.

        Raises:
            APIError: the client has no key, or the body is wrong or too large.
        """
        caller = self._authorised(request)
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > self._max_body_bytes:
                        raise APIError(413, f"The body has more than {self._max_body_bytes} bytes.")
        except TimeoutError:
            raise APIError(408, f"The body was not complete after {_BODY_SECONDS:.0f} seconds.") from None
        _caller.set(caller)
        return parsed(kind, bytes(raw), caller)

    def _authorised(self, request: HTTPRequest) -> str | None:
        """Return the name of the key that the client has sent; None without keys.

        Raises:
            APIError: the client has sent no key, or a wrong key.
        """
        if self._keys is None:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip(" ") if scheme.lower() == "bearer" else ""  # which is the key of nobody
        given = sha256(key.encode("latin-1")).digest()  # the bytes that were sent
        found = [name for digest, name in self._keys if hmac.compare_digest(digest, given)]  # all, in the same time
        if not found:
            raise APIError(
                401, "The API key is missing or wrong: send Authorization: Bearer …", None, "invalid_api_key"
            )
        return found[0]

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            known = ", ".join(map(repr, self._models))
            raise APIError(404, f"The model {name!r} does not exist; there is {known}.", "model", "model_not_found")
        return self._models[name]

    async def _answer(self, http: HTTPRequest, kind: type[Base], made: type[Answer], send: Any) -> None:
        asked = await self._asked(kind, http)
        model, request = self._model(asked.model), asked._chat()
        service, call, answer = model.service, model.call(request), made(asked, model.name)
        assert service is not None, "the application is entered by its server, or by asgi.lifespan(application)"
        said = Answer(asked, model.name, answer.id) if self._traces_content and made is not Embeddings else None

        def seen(item: Any) -> Any:
            if said is not None:
                with suppress(*MALFORMED):  # a span changes no answer
                    said.gather(item)
            return item

        async def whole() -> Response:
            try:
                if model.is_embeddings:
                    for vector in await service.map(call):
                        answer.gather(vector)
                elif model.gives_stream:
                    async with service.stream(call) as items:
                        async for item in items:
                            answer.gather(seen(item))
                else:
                    answer.gather(seen(await service.run(call)))
            except EngineClosedError as error:
                raise _of_call(error, model) from None
            answer.is_complete = True
            return Response(answer.json(), media_type="application/json")

        def ended() -> bytes:
            answer.is_complete = True
            return answer.end()

        def failed(error: Exception) -> str:
            answer.error = error
            return as_json(_told_of(error)[1]).decode()

        with measured(answer, http, request._messages(), said, lambda error: _told_of(error)[0]) as said:
            if isinstance(request, Request) and request.stream:
                events = object if self._events == "comments" else _NoEvent
                is_plain = model.gives_stream and self._events == "drop"
                response = asgi.event_stream(
                    service.stream(call) if is_plain else service.stream(call, events=events),
                    encode=answer.part if said is None else lambda item: answer.part(seen(item)),
                    encode_event=_comment,
                    end=ended,
                    encode_error=lambda error: answer.failed(error, _told_of(error)[1]),
                )
            else:
                response = await asgi.answer(http, whole(), encode_error=failed)
            try:
                await response(http.scope, http.receive, send)
                answer.status = response.status_code
            except EngineClosedError as error:
                raise _of_call(error, model) from None

    # --- models, health and metrics

    async def _list_models(self, http: HTTPRequest) -> Response:
        self._authorised(http)
        return JSONResponse({"object": "list", "data": [_shown(name) for name in self._models]})

    async def _show_model(self, http: HTTPRequest) -> Response:
        self._authorised(http)
        return JSONResponse(_shown(self._model(http.path_params["name"]).name))

    async def _ready(self, http: HTTPRequest) -> Response:
        states = {name: one.state for name, one in self._models.items()}
        is_ready = {*states.values()} <= {"ready", "down"} and "ready" in states.values()
        return JSONResponse(states, 200 if is_ready else 503, {} if is_ready else retry_after_header(None))

    async def _metrics(self, http: HTTPRequest) -> Response:
        self._authorised(http)
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            raise APIError(404, "There are no metrics: opentelemetry-exporter-prometheus is not installed.") from None
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _told(self, http: HTTPRequest, error: Exception) -> Response:
        status, told, headers = _told_of(error)
        return Response(as_json(told), status, headers, "application/json")


def openai(
    models: Mapping[str, Any],
    /,
    *,
    api_keys: Collection[str] | Mapping[str, str] | None = None,
    parts: Iterable[AbstractAsyncContextManager[Any]] = (),
    events: Literal["comments", "drop"] = "drop",
    trace_content: bool = False,
    max_body_bytes: int = _MAX_BODY_BYTES,
    **options: Unpack[DeployOptions],
) -> Application:
    """Return an ASGI application that serves graphs as models, in OpenAI's protocol.

    A graph takes `messages`, a list of dicts as in the request. If the graph has a parameter `request`, it also gets
    the parsed request. It gives `str`, `AsyncIterator[str]`, `Delta` or `AsyncIterator[Delta]`.

    Args:
        models: for each name that clients use: a graph, a node, an `upstream`, or a service, whose first graph is
            served. The owner of a service enters it; the application deploys all other models together.
        api_keys: the keys that clients send; a mapping gives each key a name, which is `request.caller`. Places of the
            deployment are shared fairly between these names. None for a server that answers everybody.
        parts: further async context managers to enter before the deployment, such as upstreams that graphs call.
        events: "comments" sends events of nodes (`ps.emit`) in a stream, as comments that clients skip; "drop" does
            not send them.
        trace_content: whether the spans of answers have the messages and the answer, in `gen_ai.input.messages` and
            `gen_ai.output.messages`. Not everybody who sees traces may be allowed to see this content.
        max_body_bytes: how large the body of a request may be, in bytes; a larger body is answered with 413.
        **options: the options of the deployment: `max_in_flight`, `max_queue`, `timeout_seconds`, `weights`,
            `max_in_flight_per_key`, `max_queue_per_key`, `warmup`. Services have options of their own, and share their
            places between API keys only if they have a suitable `key=`.

    Returns:
        The application.

    Raises:
        OptionsError: an option does not accept its value, or a model has other parameters.
    """
    if not models:
        raise OptionsError("serving.openai({}): there is no model; give one, such as {'rag': graph}")
    for name in models:
        check("model", name, NAME, "serving.openai(")
    check("max_body_bytes", max_body_bytes, whole(1), "serving.openai(")
    if events not in ("comments", "drop"):
        raise OptionsError(f"serving.openai(events={events!r}): it is 'comments' or 'drop'")
    return Application(models, api_keys, parts, events, trace_content, max_body_bytes, options)


def _digests(api_keys: Collection[str] | Mapping[str, str]) -> list[tuple[bytes, str]]:
    """Return the digest of each key with its name; a key without a name is named by the first letters of its digest."""
    digests = {key: sha256(key.encode()) for key in api_keys}
    if not digests or "" in digests or isinstance(api_keys, str):
        raise OptionsError(
            "serving.openai(api_keys=...): a collection of keys, or a mapping of keys to names, with at least one key "
            "and none that is empty; leave it out to answer everybody"
        )
    names = cast("Mapping[str, str]", api_keys if isinstance(api_keys, Mapping) else {})
    return [(one.digest(), names.get(key, one.hexdigest()[:8])) for key, one in digests.items()]


def _key(*_: object, **__: object) -> str | None:
    """Return the name of the API key of the present call, for the deployment."""
    return _caller.get()


def _told_of(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers for an error; clients see the text of an `APIError`, but of no other error."""
    match error:
        case APIError():
            return error.status, error_of(error.status, str(error), error.param, error.code), error.headers
        case HTTPException(status_code=404):
            return 404, error_of(404, "Nothing is served at this path; the base URL of clients ends with /v1."), {}
        case HTTPException():
            return error.status_code, error_of(error.status_code, error.detail), dict(error.headers or {})
        case Overloaded():
            headers = retry_after_header(error.retry_after_seconds)
            if error.key is None:
                return 503, error_of(503, "The server is overloaded."), headers
            return 429, error_of(429, "The limit of this API key is used up.", None, "rate_limit_exceeded"), headers
        case EngineClosedError():
            return 503, error_of(503, "The server takes no calls now."), retry_after_header(None)
        case TimeoutError():
            return 504, error_of(504, "The answer took too long."), {}
        case _:
            return 500, error_of(500, "The server had an error."), {}


def _of_call(error: EngineClosedError, model: _Model) -> Exception:
    """Return the error of a call for the client: as long as the model takes calls, a node has called what is closed."""
    if model.service.state != "ready":
        return error
    logs.warning("serving.failed", model=model.name, error=error, exception="".join(format_exception(error)))
    return _LoggedError(500, "The server had an error.")


_EVENT: Final = TypeAdapter[Any](Any)  # can encode dataclasses, models and dates


def _comment(event: Any) -> bytes:
    """Return a comment of a stream for what a node has emitted."""
    return b": %b\n\n" % as_json(_EVENT.dump_python(event, mode="json"))


def _shown(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the application, made from the models of the requests."""
    kinds = {path: kind for path, (kind, _) in _ANSWERS.items()}
    where = "#/components/schemas/"
    _, defined = models_json_schema([(kind, "validation") for kind in kinds.values()], ref_template=where + "{model}")
    answers = {
        "200": {"description": "The answer, as JSON, or as events if `stream` is true."},
        "4XX": {"description": "The request is wrong; `error.param` names the field."},
        "5XX": {"description": "The server could not answer; with Retry-After if it may later."},
    }
    paths: dict[str, Any] = {"/v1/models": {"get": {"operationId": "models", "responses": answers}}}
    for path, kind in kinds.items():
        content = {"application/json": {"schema": {"$ref": where + kind.__name__}}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"operationId": kind.__name__, "requestBody": body, "responses": answers}}
    info = {"title": "Penstock", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": defined["$defs"]}}


# For each path, the class of its requests and the class of its answers.
_ANSWERS: Final[Mapping[str, tuple[type[Base], type[Answer]]]] = {
    f"/v1/{kind._path}": (kind, made)
    for kind, made in (
        (ChatRequest, Answer), (CompletionRequest, Completion), (ResponsesRequest, ResponsesAnswer),
        (EmbeddingsRequest, Embeddings),
    )
}  # fmt: skip
