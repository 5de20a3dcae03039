"""From flags to a target that is ready."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

import pytest

from outrider.cli.bench.connect import reached
from outrider.cli.bench.flags import add_flags
from outrider.protocol.errors import InvalidRequest, Unavailable
from tests.certificates import self_signed
from tests.unit.cli.bench.worlds import FakeOpenAi, in_a_loop, whole

MODELS = whole({"data": [{"id": "peer"}]})


def flags(*arguments: str) -> argparse.Namespace:
    """A command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


@in_a_loop
async def test_https_is_checked(tmp_path: Path) -> None:
    """A server whose authority is named is reached; one that nobody vouches for is not."""
    files = self_signed(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["cert"], files["key"])
    async with FakeOpenAi(MODELS).serving(tls) as server:
        async with reached(flags("--openai", server.url, "--tls-ca", files["cert"])) as target:
            assert (target.served.address, target.served.model) == (server.url, "peer")
        with pytest.raises(Unavailable, match=r"cannot reach .*certificate"):
            async with reached(flags("--openai", server.url)):
                pass


@in_a_loop
async def test_a_token_that_no_header_can_carry() -> None:
    """Is refused before anything is sent."""
    async with FakeOpenAi(MODELS).serving() as server:
        with pytest.raises(InvalidRequest, match="--token: must be printable ASCII"):
            async with reached(flags("--openai", server.url, "--token", "a\nb")):
                pass
    assert server.requests == []
