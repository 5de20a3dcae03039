"""Checks bearer tokens of public calls."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc

from outrider.protocol.errors import ConfigError, Unauthenticated
from outrider.rpc.reloading import Contents, Reloaded

SCHEME = "bearer "
SETTING = "auth_tokens_file"
REFUSED = "authorization: send 'Bearer <token>' with a token that this service knows"
CHECK_SECONDS = 1.0
"""Seconds between two reads of the file. A token that was removed works for at most this long."""


@dataclass(frozen=True, slots=True)
class BearerTokens:
    """Digests of the accepted tokens. Their lengths are equal, so the time of comparing tells nothing."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def parse(cls, contents: Contents) -> BearerTokens:
        """One token per line; empty lines are skipped.

        Raises:
            ConfigError: there is no token, or one that a header cannot carry.
        """
        lines = [line.strip() for line in contents[SETTING].split(b"\n")]
        tokens = [line for line in lines if line]
        if not tokens:
            raise ConfigError(f"{SETTING}: the file has no token")
        for number, line in enumerate(lines, 1):
            if not all(0x21 <= byte <= 0x7E for byte in line):
                raise ConfigError(f"{SETTING}: line {number} has a blank or non-ASCII character in its token")
        return cls(tuple(sha256(token).digest() for token in tokens))

    def know(self, digest: bytes) -> bool:
        """Whether the token with this digest is accepted; takes the same time for every digest."""
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


def read_tokens(path: str, clock: Callable[[], float] = time.monotonic) -> Reloaded[BearerTokens]:
    """The tokens of a file, which is read again when it changes.

    Raises:
        ConfigError: the file cannot be read or has no usable token.
    """
    return Reloaded("bearer_tokens", {SETTING: path}, BearerTokens.parse, period=CHECK_SECONDS, clock=clock)


def token_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The bearer token that a call brought; empty when it brought none, or more than one."""
    headers = [value for key, value in metadata if key == "authorization"]
    header = headers[0] if len(headers) == 1 else ""
    if isinstance(header, bytes) or header[: len(SCHEME)].lower() != SCHEME:
        return ""
    return header[len(SCHEME) :].strip()


def digest_of(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Digest of the bearer token that a call brought; empty when it brought none, or more than one."""
    token = token_of(metadata)
    return sha256(token.encode()).digest() if token else b""


class BearerAuth(grpc.aio.ServerInterceptor):
    """Refuses calls of one service without a known token; health, reflection and the scaler need none."""

    def __init__(self, service_name: str, tokens: Reloaded[BearerTokens]) -> None:
        self._prefix = f"/{service_name}/"
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        if handler_call_details.method.startswith(self._prefix) and not self._allows(handler_call_details):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)

    def _allows(self, call: grpc.HandlerCallDetails) -> bool:
        return self._tokens.current().know(digest_of(call.invocation_metadata or ()))


async def _refuse(_requests: object, _context: object) -> None:
    raise Unauthenticated(REFUSED)
