"""An HTTP client without a network: calls an ASGI application as a server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from orchestrator.gateway.app import Gateway
from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.incoming.bodies import Bodies
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.request.auth import BearerTokens
from outrider.client import AsyncClient, Retries

JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Response:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(b"".join(self.parts))

    @property
    def error(self) -> dict[str, Any]:
        """The body's error."""
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def ids(self) -> list[str]:
        """The ids of server-sent events."""
        lines = b"".join(self.parts).decode().split("\n")
        return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]

    @property
    def events(self) -> list[Any]:
        """The values of server-sent events, [DONE] as text."""
        lines = b"".join(self.parts).decode().split("\n\n")
        data = [one.removeprefix("data: ") for line in lines if line for one in line.split("\n")[-1:]]
        return [json.loads(one) if one.startswith("{") else one for one in data]


class Http:
    """Calls one application."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.leave = asyncio.Event()
        """Set: the caller has closed the connection."""

    async def get(self, path: str, **headers: str) -> Response:
        """A GET."""
        return await self.request("GET", path, b"", headers)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Response:
        """A POST of JSON, or of bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, {**JSON, **(headers or {})})

    async def request(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> Response:
        """Any request; the path may have a query."""
        response, sent = Response(), [data]

        async def receive() -> Any:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                response.parts.append(message["body"])

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        path, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        scope |= {"headers": raw, "root_path": ""}
        await self.app(scope, receive, send)
        return response


class FakeTokens:
    """Tokens that do not change."""

    def __init__(self, text: bytes) -> None:
        self._tokens = BearerTokens.parse({"auth_tokens_file": text})

    def current(self) -> BearerTokens:
        """As they are now."""
        return self._tokens


@dataclass(slots=True)
class Rig:
    """A gateway before an orchestrator."""

    gateway: Gateway
    http: Http
    registry: CollectorRegistry
    healthy: list[bool]


@asynccontextmanager
async def rig(
    endpoint: str,
    tokens: bytes = b"",
    max_bytes: int = 1 << 20,
    seconds: float = 30.0,
    page: bool = True,
    figures: bool = False,
    format: OutputFormat | None = None,
) -> AsyncIterator[Rig]:
    """A gateway that calls an endpoint."""
    registry, healthy, bodies = CollectorRegistry(), [True], Bodies(max_bytes, seconds=0.2)

    async def health() -> bool:
        return healthy[0]

    async with AsyncClient(endpoint, retries=Retries(begin=(), resume=(0.0, 0.0))) as client:
        known: Any = FakeTokens(tokens) if tokens else None
        instruments = GatewayInstruments(registry)
        more: Any = {"page": page, "figures": figures, "format": format}
        gateway = Gateway(client, health, bodies, seconds, known, instruments, registry, **more)
        yield Rig(gateway, Http(gateway), registry, healthy)
    bodies.close()


def posted(
    endpoint: str, path: str, body: Any, headers: dict[str, str] | None = None, **options: Any
) -> Response:
    """The answer of a gateway of its own to a POST."""

    async def run() -> Response:
        async with rig(endpoint, **options) as made:
            return await made.http.post(path, body, headers)

    return asyncio.run(run())
