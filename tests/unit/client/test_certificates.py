"""The TLS files of the clients: what an error calls them, and files renewed while a client is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, Client, Retries
from outrider.protocol.errors import ConfigError
from tests.certificates import self_signed
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving

AT_ONCE = Retries((0.0, 0.0), (0.0, 0.0))


def blocking(endpoint: str, prompts: int, then: Callable[[], object], **settings: Any) -> list[str]:
    """Texts of a `Client`; `then` is called after each."""
    with Client(endpoint, retries=AT_ONCE, **settings) as client:
        return [(client.generate("x").text, then())[0] for _ in range(prompts)]


def asynchronous(endpoint: str, prompts: int, then: Callable[[], object], **settings: Any) -> list[str]:
    """The same of an `AsyncClient`."""

    async def run() -> list[str]:
        async with AsyncClient(endpoint, retries=AT_ONCE, **settings) as client:
            return [((await client.generate("x")).text, then())[0] for _ in range(prompts)]

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [blocking, asynchronous])
def test_an_error_calls_a_file_as_the_client_does(tmp_path: Path, ask: Callable[..., list[str]]) -> None:
    """A caller who gave `tls_ca` has no setting `tls_client_ca`."""
    files = self_signed(tmp_path)
    for given, sentence in (
        ({"tls_ca": "/nowhere"}, "tls_ca: cannot read"),
        ({"tls_ca": files["key"]}, "tls_ca: is no PEM file"),
        ({"tls_ca": "system", "tls_cert": "x"}, "tls_key: must be set when tls_cert is"),
        ({"tls_cert": "x", "tls_key": "x"}, "tls_ca: must be set when a client certificate is"),
        ({"tls_ca": "system", "tls_cert": files["key"], "tls_key": files["key"]}, "tls_cert: is no PEM"),
    ):
        with pytest.raises(ConfigError, match=f"^{sentence}"):
            ask("127.0.0.1:1", 1, int, **given)


@pytest.mark.parametrize("ask", [blocking, asynchronous])
def test_unusable_renewed_files_do_not_end_a_client(tmp_path: Path, ask: Callable[..., list[str]]) -> None:
    """Retries of a broken stream open connections of their own, with the last files that could be used."""
    files = self_signed(tmp_path)
    pair = (Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes())
    with serving(FakeOrchestrator(), credentials=grpc.ssl_server_credentials([pair])) as (fake, endpoint):

        def spoil() -> None:
            Path(files["cert"]).write_text("half written")
            fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE)]

        texts = ask(endpoint, 2, spoil, tls_ca=files["cert"])
        assert texts == ["one two three"] * 2
        assert len(fake.requests) == 3
