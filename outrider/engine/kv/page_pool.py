"""KV memory accounting: which pages exist, who holds them, what they contain. No tensors here.

A *page* holds `page_size` consecutive entries; a *slot* is `page * page_size + offset`. Pages are counted by
reference. A full page of committed tokens is published under the hash of all tokens up to its end, so that a
sequence with the same beginning shares it. When its last owner goes, it stays as *cached*: it is still found
by content, and when free pages run out, the least recently used cached pages are reused.

    total = used + cached + free          available = cached + free
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.kv.kept_states import KeptStates
from outrider.protocol.errors import InternalError, OutOfPages


class PageOwner(Protocol):
    """Anything that holds one reference on each of its pages."""

    pages: list[int]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How many pages there are, by state."""

    total: int
    used: int
    cached: int
    free: int


class PagePool:
    """All pages of one model's KV memory. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.sharing = True
        """True where sequences publish full pages for reuse."""
        self.kept_states: KeptStates | None = None
        """States of recurrent layers at the end of some published pages; None where a model has no such
        layers."""
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Published pages without an owner, least recently used first."""

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free) + len(self._cached)

    def statistics(self) -> PoolStatistics:
        """Pages by state."""
        return PoolStatistics(
            self.num_pages, self.num_pages - self.available, len(self._cached), len(self._free)
        )

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference.

        Raises:
            OutOfPages: fewer are available; nothing changed.
        """
        if count > self.available:
            raise OutOfPages(
                f"{count} KV pages of {self.page_size} tokens are needed and {self.available} of "
                f"{self.num_pages} are available; retry later or raise kv_tokens"
            )
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; cached ones become used again."""
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page, last page first: a prefix outlives what follows it."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} released once too often"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable by content; if several have the same content, the first is found."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Make pages that somebody holds no longer findable: what is in them is wrong."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]
                if self.kept_states is not None:
                    self.kept_states.forget(key)

    def forget(self) -> None:
        """Make no page findable any more."""
        self.withdraw(list(self._key_of))
        self._free.extend(self._cached)
        self._cached.clear()

    def cached_prefix(self, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the pages that hold the longest published beginning of `tokens`, and the hash at its end.

        Where a model has recurrent layers, only a beginning counts whose states are kept.
        """
        pages: list[int] = []
        count, end = 0, b""
        for key in page_keys(tokens, self.page_size):
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
            if self.kept_states is None or key in self.kept_states:
                count, end = len(pages), key
        return pages[:count], end

    def check_integrity(self, owners: Iterable[PageOwner]) -> None:
        """Check that only `owners` hold pages, and that every page is in exactly one state.

        Raises:
            InternalError: pages leaked, were freed while in use, or are in two states at once.
        """
        held = [0] * self.num_pages
        for owner in owners:
            for page in owner.pages:
                held[page] += 1
        wrong = [p for p in range(self.num_pages) if held[p] != self._references[p]]
        if wrong:
            page = wrong[0]
            raise InternalError(
                f"{len(wrong)} KV pages miscounted; page {page} has {self._references[page]} references "
                f"and {held[page]} owners"
            )
        idle = sorted([*self._free, *self._cached])
        expected = [page for page in range(self.num_pages) if not held[page]]
        if idle != expected:
            raise InternalError(
                f"{len(expected)} KV pages have no owner, {len(self._free)} are free "
                f"and {len(self._cached)} cached"
            )
        if {page: key for key, page in self._page_of.items()} != self._key_of or any(
            page in self._key_of for page in self._free
        ):
            raise InternalError(f"the content index of {len(self._page_of)} KV pages contradicts itself")

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a page's tokens and, through `previous`, of all tokens before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=previous, digest_size=32).digest()


def page_keys(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """Yield the content hashes of the full pages of `tokens`, in order."""
    key = b""
    for end in range(page_size, len(tokens) + 1, page_size):
        key = chain(key, tokens[end - page_size : end])
        yield key


def all_page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the content hashes of all pages of `tokens`; the last page need not be full."""
    keys = list(page_keys(tokens, page_size))
    rest = tokens[len(keys) * page_size :]
    return [*keys, chain(keys[-1] if keys else b"", rest)] if rest else keys
