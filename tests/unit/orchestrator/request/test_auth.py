"""Bearer tokens: who is let in, and what happens when the file changes."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.main import SERVICE
from orchestrator.request import auth
from orchestrator.request.auth import BearerAuth, BearerTokens, digest_of, read_tokens
from outrider.config import ServiceConfig
from outrider.protocol.errors import ConfigError, Unauthenticated
from outrider.rpc.channels import error_of, open_channel
from outrider.rpc.serving import GrpcServer
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import mount


class Door:
    """Calls a server behind `BearerAuth`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def opens(self, *headers: str | bytes) -> bool:
        """Whether a call with these authorization headers passes; nothing is behind the door."""
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        metadata = tuple(("authorization", header) for header in headers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), metadata=metadata)
        if caught.value.code() is grpc.StatusCode.UNIMPLEMENTED:
            return True
        assert isinstance(error_of(caught.value), Unauthenticated)
        return False


@asynccontextmanager
async def door(file: Path) -> Any:
    """A server that wants a token of the file."""
    server = GrpcServer(ServiceConfig(), [SERVICE], [BearerAuth(SERVICE, read_tokens(str(file)))])
    await server.start()
    server.set_serving(True)
    try:
        async with open_channel(server.endpoint) as channel:
            yield Door(channel)
    finally:
        await server.stop()


async def test_calls_need_a_token(tmp_path: Path) -> None:
    """One of several, as bearer, exactly and once; health needs none."""
    file = tmp_path / "tokens"
    file.write_text("first\n\n second \r\n")
    async with door(file) as calls:
        health = health_pb2_grpc.HealthStub(calls.channel)
        assert await health.Check(health_pb2.HealthCheckRequest())
        for header in ("", "second", "Basic second", "Bearer", "Bearer third", "Bearer secondx"):
            assert not await calls.opens(header)
        assert not await calls.opens()
        assert not await calls.opens("Bearer first", "Bearer second")
        for header in ("Bearer first", "bearer second", "BEARER   second "):
            assert await calls.opens(header)


def replace_in_place(folder: Path, text: str) -> None:
    """A write over the old file."""
    (folder / "tokens").write_text(text)


def replace_by_rename(folder: Path, text: str) -> None:
    """A new file in the old one's place, in one step."""
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / "tokens")


def replace_by_link(folder: Path, text: str) -> None:
    """As a kubelet does."""
    mount(folder, {"tokens": text.encode()})


@pytest.mark.parametrize("replace", [replace_in_place, replace_by_rename, replace_by_link])
async def test_tokens_are_rotated_without_a_restart(
    tmp_path: Path, replace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add the new token beside the old one, move callers, take the old one out; a file without a token lets
    nobody in or out."""
    monkeypatch.setattr(auth, "CHECK_SECONDS", 0.0)
    replace(tmp_path, "old")
    async with door(tmp_path / "tokens") as calls:
        for text, opens in (
            ("old", (True, False)),
            ("old\nnew", (True, True)),
            ("new", (False, True)),
            ("\n", (False, True)),
            ("new two", (False, True)),
            ("old", (True, False)),
        ):
            replace(tmp_path, text)
            assert (await calls.opens("Bearer old"), await calls.opens("Bearer new")) == opens, text


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words\n", b"good\nb\xc3\xa4d\n", b"\xff\n"])
def test_a_tokens_file_must_have_tokens(tmp_path: Path, content: bytes) -> None:
    """Otherwise the process stops instead of opening the door or locking everybody out; the message does not
    repeat what is in the file."""
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^auth_tokens_file: (the file has|line \d)") as caught:
        read_tokens(str(tmp_path / "tokens"))
    assert "words" not in str(caught.value)
    with pytest.raises(ConfigError, match="auth_tokens_file: cannot read"):
        read_tokens(str(tmp_path / "missing"))


def test_tokens_are_not_kept() -> None:
    """Only their digests are, which are compared in constant time and not shown."""
    tokens = BearerTokens.parse({"auth_tokens_file": b"s3cret\nother"})
    assert tokens.know(digest_of([("authorization", "Bearer s3cret")]))
    assert not tokens.know(digest_of([("authorization", "Bearer none")]))
    assert not tokens.know(b"")
    assert {len(digest) for digest in tokens.digests} == {32}
    assert repr(tokens) == "BearerTokens()"


def test_every_known_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time does not tell which token matched."""
    compared = []

    def compare(one: bytes, two: bytes) -> bool:
        compared.append(two)
        return one == two

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    tokens = BearerTokens.parse({"auth_tokens_file": b"a\nb\nc"})
    for header in ("Bearer a", "Bearer c", "Bearer d"):
        compared.clear()
        tokens.know(digest_of([("authorization", header)]))
        assert compared == list(tokens.digests)


def test_reading_happens_once_a_second(tmp_path: Path) -> None:
    """However many calls come."""
    (tmp_path / "tokens").write_text("old")
    now = 5.0
    tokens = read_tokens(str(tmp_path / "tokens"), clock=lambda: now)
    (tmp_path / "tokens").write_text("new")
    first = tokens.current()
    now += 0.9
    assert tokens.current() is first
    now += 0.2
    assert tokens.current() is not first
