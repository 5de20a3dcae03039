"""Bearer tokens at the public edge."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import ConfigError, Unauthenticated

SCHEME = "bearer "


def read_tokens(path: str) -> tuple[bytes, ...]:
    """One token per line; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read or has no token.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth_tokens_file: cannot read {path!r} ({error})") from error
    tokens = tuple(line.strip().encode() for line in lines if line.strip())
    if not tokens:
        raise ConfigError(f"auth_tokens_file: {path!r} has no token")
    return tokens


class BearerAuth(grpc.aio.ServerInterceptor):
    """Refuses calls of one service without a known token; health and reflection need none."""

    def __init__(self, service_name: str, tokens: Sequence[bytes]) -> None:
        self._prefix = f"/{service_name}/"
        self._tokens = tuple(tokens)

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
        metadata = dict(call.invocation_metadata or ())
        presented = metadata.get("authorization", "")
        if isinstance(presented, bytes) or presented[: len(SCHEME)].lower() != SCHEME:
            return False
        token = presented[len(SCHEME) :].strip().encode()
        matches = [hmac.compare_digest(token, known) for known in self._tokens]  # all: constant time
        return any(matches)


async def _refuse(_requests: object, _context: object) -> None:
    raise Unauthenticated("authorization: send 'Bearer <token>' with a token that this service knows")
