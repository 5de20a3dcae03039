"""Keys and values on their way from one verify replica to another, as plain values.

A transfer is the tokens, the layout, then all pages in order. The digest of a page covers its bytes and,
through its key, all tokens up to its end: a page at the wrong place does not fit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TypeAlias

from outrider.protocol.errors import InvalidRequest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvTokens:
    """What the keys and values are of."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What keys and values are made of and how they lie in a page."""

    weights: str
    """Fingerprint of the model's configuration and weights."""
    arithmetic: str
    dtype: str
    page_size: int
    shape: str

    @property
    def name(self) -> str:
        """Equal for equal layouts, for `ModelInfo.kv_layout`."""
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
    """Pages that follow each other, each with its digest."""

    first: int
    contents: tuple[bytes, ...]
    digests: tuple[bytes, ...]


KvPart: TypeAlias = KvTokens | KvLayout | KvPages


def page_digest(key: bytes, content: bytes) -> bytes:
    """What a page's bytes must come with; `key` is the hash of all tokens up to its end."""
    return hashlib.blake2b(content, key=key, digest_size=DIGEST_BYTES).digest()
