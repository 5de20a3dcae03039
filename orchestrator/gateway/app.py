"""The ASGI application: paths, tokens, request ids, and errors as responses."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.endpoints import Generating, Models, Resources
from orchestrator.gateway.errors import WRONG, Kind, Problem
from orchestrator.gateway.incoming.bodies import Bodies
from orchestrator.gateway.incoming.requests import chat_from, completions_from
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.messages import endpoint as messages
from orchestrator.gateway.messages.errors import body_of
from orchestrator.gateway.page import endpoint as steps
from orchestrator.gateway.page.files import page_files
from orchestrator.gateway.responses import endpoint as responses
from orchestrator.gateway.sending import (
    ENDING,
    Receive,
    Scope,
    Send,
    problem_from,
    send_bytes,
    send_json,
    send_problem,
)
from orchestrator.gateway.tokens import Converting
from orchestrator.request.auth import REFUSED, BearerTokens, digest_of, token_of
from outrider import __version__
from outrider.client import AsyncClient
from outrider.protocol.errors import Unauthenticated, Unavailable
from outrider.request_ids import HEADER, request_id_of
from outrider.rpc.reloading import Reloaded
from outrider.telemetry.logs import get_logger, request_context

logger = get_logger(__name__)
NOT_FOUND = Kind(404, WRONG, "not_found")
NOT_ALLOWED = Kind(405, WRONG, "method_not_allowed")
TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
API_KEY = b"x-api-key"
ID_OF_MESSAGES = "request-id"
"""Header in which Anthropic's clients look for a request's id."""
HEALTH_SECONDS = 2.0
OPEN = ("/health", "/version", "/metrics")
"""Paths of probes and scrapes: they need no token, and are neither counted nor logged."""
ENDPOINTS = (
    *("/v1/completions", "/v1/chat/completions", responses.PATH),
    *(responses.COUNT_PATH, messages.PATH, messages.COUNT_PATH),
    *("/v1/models", "/tokenize", "/detokenize"),
    steps.PATH,
)


class Gateway:
    """The application. While `draining` is set, because the process ends, it refuses new requests."""

    def __init__(
        self,
        client: AsyncClient,
        health: Callable[[], Awaitable[bool]],
        bodies: Bodies,
        seconds: float,
        tokens: Reloaded[BearerTokens] | None,
        instruments: GatewayInstruments,
        registry: CollectorRegistry = REGISTRY,
        page: bool = True,
        format: OutputFormat | None = None,
        figures: bool = False,
    ) -> None:
        """`format` is that of the model's output; None: it is all text."""
        self._format = format or OutputFormat()
        self.draining = False
        self.running = 0
        self._health = health
        self._figures = figures
        self._tokens = tokens
        self._instruments = instruments
        self._registry = registry
        self._page = page_files() if page else {}
        resources = Resources(client, bodies, instruments, seconds)
        self.router = Router(self._routes(resources), redirect_slashes=False)
        self.router.default = cast(ASGIApp, self._not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} is served")
        headers = dict(scope["headers"])
        scope["state"] = state = _state(headers) | {"figures": self._figures}
        names = (HEADER, ID_OF_MESSAGES) if _of_messages(scope) else (HEADER,)
        answer, began = _Answer(send, state["request_id"], names), time.monotonic()
        if counted := scope["path"] not in OPEN:
            self._enter(1)
        try:
            with request_context(state["request_id"]):
                await self._answer(scope, receive, answer, headers)
        finally:
            if counted:
                self._enter(-1)
                self._log(scope, answer, time.monotonic() - began)

    def _enter(self, change: int) -> None:
        self.running += change
        self._instruments.running.inc(change)

    async def _answer(
        self, scope: Scope, receive: Receive, answer: _Answer, headers: dict[bytes, bytes]
    ) -> None:
        try:
            if self.draining:
                raise Unavailable(ENDING)
            self._check_token(scope, headers)
            await self.router(scope, receive, answer.send)
        except (Exception, asyncio.CancelledError) as error:  # the last line of defence
            begun, answer.problem = answer.status, problem_from(error)
            if not begun:
                await send_problem(answer.send, answer.problem, partial(_body, scope))

    def _check_token(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._tokens is None or scope["path"] in OPEN or scope["path"] in self._page:
            return
        if not self._tokens.current().know(digest_of(_authorization(headers))):
            raise Unauthenticated(REFUSED)

    def _log(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        path, problem = scope["path"], answer.problem
        status = answer.status if problem is None else problem.kind.status
        endpoint = path if path in ENDPOINTS else "other"
        self._instruments.finished(endpoint, status, seconds)
        if endpoint != "other":
            more = {"request_id": scope["state"]["request_id"]}
            if problem is not None and problem.parameter is not None:  # it may be a name of the caller's
                more["param"] = problem.parameter.encode("unicode_escape").decode()
            logger.info("answered", endpoint=endpoint, status=status, seconds=round(seconds, 4), **more)

    def _routes(self, resources: Resources) -> list[Route]:
        models, converting = Models(resources.client, resources.instruments), Converting(resources)
        return [
            _route("/v1/completions", Generating(resources, completions_from, self._format), "POST"),
            _route("/v1/chat/completions", Generating(resources, chat_from, self._format), "POST"),
            _route(responses.PATH, responses.responding(resources, self._format), "POST"),
            _route(responses.COUNT_PATH, responses.counting(resources), "POST"),
            _route(messages.PATH, messages.messaging(resources, self._format), "POST"),
            _route(messages.COUNT_PATH, messages.counting(resources), "POST"),
            _route("/v1/models", models, "GET"),
            _route("/v1/models/{model:path}", models, "GET"),
            _route("/tokenize", converting.tokenize, "POST"),
            _route("/detokenize", converting.detokenize, "POST"),
            _route("/health", self._healthy, "GET"),
            _route("/version", _version, "GET"),
            _route("/metrics", self._metrics, "GET"),
            *self._page_routes(resources),
        ]

    def _page_routes(self, resources: Resources) -> list[Route]:
        """The page's files, which need no token, and the events that it reads."""
        if not self._page:
            return []
        found = [_route(path, file, "GET") for path, file in self._page.items()]
        return [*found, _route(steps.PATH, steps.Steps(resources), "POST")]

    async def _not_found(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        paths = ", ".join(path for path in ENDPOINTS if self._page or path != steps.PATH)
        raise Problem(NOT_FOUND, f"{scope['path'][:200]}: nothing is here; use one of {paths}")

    async def _healthy(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        if not await self._health():
            raise Unavailable("the orchestrator cannot serve now")
        await send_json(send, 200, {})

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())


class _Answer:
    """Adds the request's id to the answer's headers, under all `names`. Keeps the answer's status, which is 0
    before it has begun, and the error that ended the request, even within a stream.
    """

    def __init__(self, send: Send, request_id: str, names: Sequence[str]) -> None:
        self._send = send
        self._ids = [(name.encode(), request_id.encode()) for name in names]
        self.status = 0
        self.problem: Problem | None = None

    async def send(self, message: Any) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._ids]
        await self._send(message)


class _App:
    """Wraps a method as an ASGI application: Starlette would take a plain function for another interface."""

    def __init__(self, method: str, answer: Callable[[Scope, Receive, Send], Any]) -> None:
        self._method = method
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["method"] not in (self._method, "HEAD" if self._method == "GET" else ""):
            message = f"{scope['method'][:20]}: {scope['path'][:200]} takes {self._method}"
            raise Problem(NOT_ALLOWED, message, None, {"allow": self._method})
        await self._answer(scope, receive, send)


def health_of(channel: Any) -> Callable[[], Awaitable[bool]]:
    """Return a function that asks the orchestrator at the end of a channel whether it serves."""
    stub = health_pb2_grpc.HealthStub(channel)

    async def healthy() -> bool:
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS)
        except Exception:  # whatever the error is, the orchestrator does not serve
            return False
        serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
        return serving

    return healthy


def _route(path: str, answer: Any, method: str) -> Route:
    return Route(path, _App(method, answer))


def _state(headers: dict[bytes, bytes]) -> dict[str, Any]:
    """What is taken from a request's headers and passed on unchanged: its id, trace and token."""
    given = headers.get(HEADER.encode(), b"").decode("latin-1")
    trace = headers.get(b"traceparent", b"")
    return {
        "request_id": request_id_of(given),
        "traceparent": trace.decode() if TRACEPARENT.fullmatch(trace) else "",
        "token": token_of(_authorization(headers)),
    }


def _authorization(headers: dict[bytes, bytes]) -> list[tuple[str, str]]:
    """The header with the bearer token, or what it would be for the key that Anthropic's clients send."""
    given = [("authorization", headers.get(b"authorization", b"").decode("latin-1"))]
    key = headers.get(API_KEY)
    return [("authorization", f"Bearer {key.decode('latin-1')}")] if key and not token_of(given) else given


def _of_messages(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API."""
    path: str = scope["path"]
    return path == messages.PATH or path.startswith(f"{messages.PATH}/")


def _body(scope: Scope, problem: Problem) -> dict[str, Any]:
    """An error in the form of the API that the request is for."""
    if _of_messages(scope):
        return body_of(problem, scope["state"]["request_id"])
    return problem.body()


async def _version(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send_json(send, 200, {"version": __version__})
