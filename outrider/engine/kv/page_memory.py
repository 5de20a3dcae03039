"""The bytes of KV pages, for replicas that pass them to each other.

Any thread may read or write a page here, as long as its sequence is set aside: then no step touches it. On a
GPU this also holds for what the engine has launched, because all threads use one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class PageMemory:
    """Pages of `page_size` entries in `stores`, each [layers, slots, ...]."""

    def __init__(self, stores: Sequence[Tensor], page_size: int) -> None:
        self._stores = list(stores)
        self._page_size = page_size
        self._shapes = [(store.shape[0], page_size, *store.shape[2:]) for store in stores]
        self._sizes = [
            prod(shape) * store.dtype.itemsize
            for shape, store in zip(self._shapes, self._stores, strict=True)
        ]

    @property
    def page_bytes(self) -> int:
        """Size of one page."""
        return sum(self._sizes)

    @property
    def shape(self) -> str:
        """The shapes of what a page holds, such as `12x16x512`."""
        return "+".join("x".join(map(str, shape)) for shape in self._shapes)

    def read(self, page: int, used: int) -> bytes:
        """A page's bytes: the first `used` entries, then zeros."""
        parts = [self._entries(store, page).clone().cpu() for store in self._stores]
        for part in parts:
            part[:, used:] = 0
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, page: int, content: bytes) -> None:
        """Overwrite a page; `content` has `page_bytes` bytes."""
        assert len(content) == self.page_bytes, "checked by the caller"
        start = 0
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for store, shape, size in zip(self._stores, self._shapes, self._sizes, strict=True):
            entries = data[start : start + size].clone().view(store.dtype).view(shape)
            self._entries(store, page).copy_(entries)
            start += size

    def _entries(self, store: Tensor, page: int) -> Tensor:
        """Return the entries [layers, page_size, ...] of one page."""
        return store[:, page * self._page_size : (page + 1) * self._page_size]
