"""The opaque `session` of a Complete: what the next turn needs to find its keys and values again.

A ticket is only a hint and does not contain tokens. The next prompt must have them all; a prompt that does
not begin with the tokens of the ticket is simply prefilled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import KvHandle

MAX_BYTES = 4096
_MAGIC = b"outrider1:"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A KV handle, the endpoint of its owner, and our own digest of the tokens it covers."""

    endpoint: str
    handle: KvHandle
    tokens_digest: str

    @classmethod
    def issue(cls, endpoint: str, handle: KvHandle, tokens: Sequence[int]) -> Ticket:
        """A ticket for a handle that covers the first `handle.length` of `tokens`."""
        return cls(endpoint, handle, _digest(tokens[: handle.length]))

    def covers(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt continues the tokens of the ticket."""
        length = self.handle.length
        return 0 < length < len(prompt) and _digest(prompt[:length]) == self.tokens_digest

    def serialize(self) -> bytes:
        """The ticket as bytes for the client."""
        handle = self.handle
        fields: list[str | int] = [
            self.endpoint,
            self.tokens_digest,
            handle.owner,
            handle.incarnation,
            handle.id,
        ]
        fields += [handle.digest.hex(), handle.length, handle.expires_unix_ms]
        return _MAGIC + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """The ticket from the bytes that `serialize` made.

        Raises:
            InvalidRequest: these bytes are not a ticket.
        """
        try:
            return cls._parse(data)
        except (ValueError, TypeError, RecursionError):
            raise InvalidRequest("session", "is not the session of an earlier Complete") from None

    @classmethod
    def _parse(cls, data: bytes) -> Ticket:
        if len(data) > MAX_BYTES or not data.startswith(_MAGIC):
            raise ValueError
        endpoint, tokens_digest, owner, incarnation, id_, digest, length, expires = json.loads(
            data[len(_MAGIC) :]
        )
        texts = (endpoint, tokens_digest, owner, incarnation, id_, digest)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError
        "".join(texts).encode()  # half a character, which could not be sent on, is a ValueError
        if not all(type(number) is int and 0 <= number < 2**63 for number in (length, expires)):
            raise ValueError
        if length >= 2**32:
            raise ValueError
        handle = KvHandle(owner, incarnation, id_, length, bytes.fromhex(digest), expires)
        return cls(endpoint, handle, tokens_digest)


def _digest(tokens: Sequence[int]) -> str:
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return blake2b(data, digest_size=16).hexdigest()
