"""What the client sends, and what it refuses to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.client import NEVER, AsyncClient
from outrider.client.blocking import Client
from outrider.protocol.errors import InvalidRequest, Unavailable
from scripts.proxy import Proxy
from tests.certificates import self_signed
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving


@contextmanager
def tls_server(files: dict[str, str]) -> Iterator[str]:
    """The endpoint of a gRPC server without services, which shows a certificate."""
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_what_is_wrong_with_tls_is_said(tmp_path: Path) -> None:
    """Without TLS, the authorities, or the name in the certificate, a client learns what to give."""
    for number, (name, given, sentence) in enumerate(
        (
            ("IP:127.0.0.1", "", "closed the connection; it has ended.* or it speaks TLS: then give"),
            ("IP:127.0.0.1", "system", "shows a certificate .* by other authorities; give its TLS"),
            ("DNS:other", "own", "shows a certificate .* for another name"),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        files = self_signed(folder, name)
        with tls_server(files) as endpoint:
            tls_ca = files["cert"] if given == "own" else given
            client = Client(endpoint, timeout=30, retries=NEVER, tls_ca=tls_ca)
            with client, pytest.raises(Unavailable, match=f"^{endpoint} {sentence}"):
                client.model_info()


async def test_a_connection_that_breaks_is_said_to() -> None:
    """In plain words; where the service says so of another connection, its words stay."""
    with serving(FakeOrchestrator()) as (fake, endpoint):
        proxy = Proxy(endpoint)
        fake.answers.clear()
        async with AsyncClient(await proxy.start(), timeout=30, retries=NEVER) as client:
            asked = asyncio.create_task(client.load())
            await asyncio.to_thread(fake.asked.wait)
            proxy.cut()
            with pytest.raises(Unavailable) as broken:
                await asked
            assert str(broken.value) == f"the connection to {client.endpoint} broke; try again"
            fake.answers.set()
            fake.error = Unavailable("draft-0: Socket closed")
            with pytest.raises(Unavailable, match=r"^draft-0: Socket closed$"):
                await client.load()
        await proxy.close()


def test_a_wrong_mode_is_named() -> None:
    """With those that there are, and not by a name of the protocol."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate("x", mode="fast")
    assert str(failure.value) == "speculation.mode: must be one of auto, sequential, off, not 'fast'"


@pytest.mark.parametrize("name", ["stop", "choice"])
def test_one_text_is_no_list_of_texts(name: str) -> None:
    """Its characters would be stop strings, each of which ends the text."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate("x", **{name: "END"})  # type: ignore[arg-type]
    assert str(failure.value) == f"sampling.{name}: must be a list, such as ['END']"


@pytest.mark.parametrize("prompt", [b"def f(", bytearray(b"def f("), None, 5])
def test_a_prompt_of_another_kind_is_refused(prompt: Any) -> None:
    """The bytes of a file would be continued as token ids."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate(prompt)
    assert str(failure.value) == "prompt: must be a text, token ids or messages"


def test_bytes_are_no_prediction() -> None:
    """They would be token ids too."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="must be a list"):
        client.generate("x", prediction=b"def f(")


@pytest.mark.parametrize("name", ["token", "request_id", "traceparent"])
def test_what_no_header_can_carry_is_refused_at_once(name: str) -> None:
    """gRPC would refuse it as if no service could be reached, and the client try it again and again."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate("x", **{name: "a\nb"})  # type: ignore[arg-type]
    assert str(failure.value) == f"{name}: must be printable ASCII"


def test_an_error_does_not_repeat_a_long_name() -> None:
    """It is logged, and sent back."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="half a char") as failure:
        client.generate("x", labels={"\ud800" + "a" * 100_000: "b"})
    assert len(str(failure.value)) < 300
