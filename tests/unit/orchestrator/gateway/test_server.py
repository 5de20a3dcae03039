"""What uvicorn is told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from pydantic import ValidationError
from starlette.types import ASGIApp

from orchestrator.gateway.sending import Receive, Send, send_json
from orchestrator.gateway.server import open_to, server_config
from outrider.config import GatewayConfig
from tests.unit.orchestrator.gateway.http import Http, Response


@pytest.mark.parametrize(("given", "told"), [(0.0, 0), (0.5, 1), (30.0, 30)])
def test_a_part_of_a_second_is_waited_for(given: float, told: int) -> None:
    """uvicorn takes whole seconds: half of one is no reason to cut requests off at once."""
    assert server_config(None, 1, given).timeout_graceful_shutdown == told


async def answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """An application."""
    await send_json(send, 200, {})


def ask(origins: tuple[str, ...], method: str, origin: str) -> Response:
    """What a page of an origin gets from an application that is open to some."""
    headers = {"origin": origin, "access-control-request-method": "POST"}
    headers |= {"access-control-request-headers": "authorization,content-type"}
    opened = Http(open_to(origins, cast(ASGIApp, answer)))
    return asyncio.run(opened.request(method, "/v1/completions", b"{}", headers))


def test_a_page_of_another_origin_may_call_where_the_setting_says_so() -> None:
    """The browser asks first, and reads the answer only where its page's origin is named."""
    for origins in (("https://chat.example",), ("*",)):
        first = ask(origins, "OPTIONS", "https://chat.example")
        assert (first.status, "authorization" in first.headers["access-control-allow-headers"]) == (200, True)
        assert ask(origins, "POST", "https://chat.example").headers["access-control-allow-origin"] in origins
    other = ask(("https://chat.example",), "POST", "https://other.example")
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in ask((), "POST", "https://chat.example").headers


def test_a_page_of_another_origin_sees_the_headers_that_clients_read() -> None:
    """The request's id, under both names, and when to try again: a browser hides all that are not named."""
    answered = ask(("https://chat.example",), "POST", "https://chat.example")
    shown = answered.headers["access-control-expose-headers"].split(", ")
    assert set(shown) == {"x-request-id", "request-id", "retry-after"}


def test_an_origin_is_a_scheme_and_a_host() -> None:
    """A path or a bare host would never equal what a browser sends."""
    for wrong in ("chat.example", "https://chat.example/", "https://*.example"):
        with pytest.raises(ValidationError, match="allowed_origins"):
            GatewayConfig(allowed_origins=(wrong,))
