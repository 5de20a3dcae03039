"""Keys and values on their way from one verify replica to another, as plain values.

A transfer sends the tokens, the layout, then all pages in order. The digest of a page covers its bytes and,
through its key, all tokens up to its end, so that a page in the wrong place is detected.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TypeAlias

from outrider.protocol.errors import InvalidRequest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvTokens:
    """The tokens that the keys and values belong to."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The model and settings that made the keys and values, and their layout in a page."""

    weights: str
    """Fingerprint of the model's configuration and weights."""
    arithmetic: str
    dtype: str
    page_size: int
    shape: str

    @property
    def name(self) -> str:
        """The value of `ModelInfo.kv_layout`: equal layouts have equal names."""
        return " ".join(str(getattr(self, field.name)) for field in fields(self))

    def check(self, other: KvLayout) -> None:
        """Raises InvalidRequest, naming the first difference, unless `other` is the same."""
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            if own != others:
                raise InvalidRequest(
                    f"layout.{field.name}",
                    f"{others!r} is not that of this replica, {own!r}; keys and values move only between "
                    "replicas with the same model, settings and kind of processor",
                )


@dataclass(frozen=True, slots=True)
class KvPages:
    """Consecutive pages, each with its digest."""

    first: int
    contents: tuple[bytes, ...]
    digests: tuple[bytes, ...]


KvPart: TypeAlias = KvTokens | KvLayout | KvPages


def page_digest(key: bytes, content: bytes) -> bytes:
    """The digest that a page's bytes must come with; `key` is the hash of all tokens up to the page's end."""
    return hashlib.blake2b(content, key=key, digest_size=DIGEST_BYTES).digest()
