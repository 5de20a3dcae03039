"""The work of a layer between its products: norms, activation, rotation, attention.

Shapes: N rows, C their width, Q query heads, H kv heads, D head width, S slots.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.cpu.backend import kind_of, vector_backend
from outrider.engine.cpu.matmul import MIN_SHARE, SHARES
from outrider.engine.cpu.panels import STEP_BYTES
from outrider.engine.cpu.recording import bits_of, launch, recording
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.step import View

MIN_POSITIONS = 4096
"""Positions whose angles are computed first. More are computed when they occur."""


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """True when the kernels take tensors of this dtype and device."""
    return device.type == "cpu" and vector_backend(dtype) is not None


def attends(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True when `AttentionKernel` takes heads of this width."""
    return runs(dtype, device) and width * dtype.itemsize % STEP_BYTES == 0


class NormKernel:
    """RMS norm of rows [N, C] with a weight [C]; or, with `centred`, layer norm, perhaps with a bias [C].
    Rows are of `dtype`.
    """

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        centred: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        from outrider.engine.cpu.kernels.norm import norm

        self._scale = weight.float().contiguous()
        self._shift = None if bias is None else bias.float().contiguous()
        self._factors = self._scale.data_ptr(), 0 if self._shift is None else self._shift.data_ptr()
        self._width = weight.shape[-1]
        self._share, self._eps = bits_of(1.0 / self._width), bits_of(eps)
        self._kernel = norm(kind_of(dtype), centred)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return self._run(x.contiguous(), 0)

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """Add `added` to x, both [..., C] contiguous, and return the norm of the sum."""
        assert x.is_contiguous(), "rows follow each other"
        assert added.is_contiguous(), "rows follow each other"
        return self._run(x, added.data_ptr())

    def _run(self, x: Tensor, added: int) -> Tensor:
        y, rows, width = torch.empty_like(x), x.numel() // self._width, self._width
        shape = width, width, rows
        places = x.data_ptr(), added, *self._factors, y.data_ptr()
        launch(self._kernel, *places, *shape, self._share, self._eps)
        return y

    def inside(self, x: Tensor) -> None:
        """Normalise rows [N, C] in place. The numbers of a row follow each other."""
        at, shape = x.data_ptr(), (self._width, x.stride(0), len(x))
        assert x.stride(1) == 1, "a row is in one piece"
        launch(self._kernel, at, 0, *self._factors, at, *shape, self._share, self._eps)


class ActivationKernel:
    """An activation of numbers of `dtype` in place, by its name in
    `outrider.engine.fused_decoder.activation`."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        from outrider.engine.cpu.kernels.activation import activation_of

        self._kernel = activation_of(kind_of(dtype), name)

    def __call__(self, x: Tensor) -> Tensor:
        """Overwrite x, which is contiguous, and return it."""
        launch(self._kernel, x.data_ptr(), x.numel())
        return x


class BoundKernel:
    """Bounds numbers of `dtype` by tanh, and rounds after each operation, as the modules of a model do."""

    def __init__(self, dtype: torch.dtype, softcap: float) -> None:
        from outrider.engine.cpu.kernels.activation import bound_of

        self._kernel, self._softcap = bound_of(kind_of(dtype)), bits_of(softcap)

    def __call__(self, x: Tensor) -> Tensor:
        """[...] -> [...]. The argument stays as it is: another rank may have it too."""
        x = x.contiguous()
        y = torch.empty_like(x)
        launch(self._kernel, x.data_ptr(), y.data_ptr(), x.numel(), self._softcap)
        return y


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous numbers in another dtype, of the three that kernels take."""
    if x.dtype == dtype:
        return x
    from outrider.engine.cpu.kernels.elementwise import convert

    y = torch.empty(x.shape, dtype=dtype)
    launch(convert(kind_of(x.dtype), kind_of(dtype)), x.data_ptr(), y.data_ptr(), x.numel())
    return y


class GateKernel:
    """A gate that an activation opens, by its name: rows [N, 2 F] of `dtype` -> [N, F]."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        from outrider.engine.cpu.kernels.activation import gate_of

        self._kernel = gate_of(kind_of(dtype), name)

    def __call__(self, x: Tensor) -> Tensor:
        """activation(gate) up; gate and up are side by side."""
        rows, width = len(x), x.shape[1] // 2
        assert x.stride(1) == 1, "a row is in one piece"
        y = torch.empty(rows, width, dtype=x.dtype)
        launch(self._kernel, x.data_ptr(), x.stride(0), y.data_ptr(), rows, width)
        return y


class Angles:
    """Cosines and sines of the positions that occurred, times `stretch`, of all pairs or of each [R / 2]."""

    def __init__(self, frequencies: Tensor, stretch: Tensor | float) -> None:
        self.frequencies = frequencies.float()
        self.stretch = torch.as_tensor(stretch, dtype=torch.float32, device=frequencies.device)
        self._table = torch.empty(0)

    def table(self, positions: Tensor) -> Tensor:
        """[more than the largest position, 2, R / 2] float32, R being the columns of a head that are
        rotated."""
        if (last := int(positions.max())) >= len(self._table):
            count = max(MIN_POSITIONS, 1 << last.bit_length())
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self.frequencies
            self._table = torch.stack((angles.cos(), angles.sin()), 1).mul_(self.stretch)
        return self._table


class RotationKernel:
    """Rotation of queries and keys, perhaps with a norm over each head, and storing keys and values."""

    def __init__(
        self, dtype: torch.dtype, heads: tuple[int, int, int], weight: Tensor | None, eps: float
    ) -> None:
        """`heads` are Q, H, and how many heads after the queries are stored; `weight` of the norm is
        [Q + H, D], or [D] for all.
        """
        from outrider.engine.cpu.kernels.rotation import rotation

        self._queries, self._rotated, self._stored = heads[0], heads[0] + heads[1], heads[2]
        self._kernel = rotation(kind_of(dtype))
        self._scale = None if weight is None else weight.float().expand(self._rotated, -1).contiguous()
        self._scale_at = 0 if self._scale is None else self._scale.data_ptr()
        self._eps = bits_of(eps)

    def __call__(self, qkv: Tensor, table: Tensor, positions: Tensor, entries: Tensor, slots: Tensor) -> None:
        """Rotate qkv [N, heads, D], contiguous, in place; store keys and values of the first rows.

        They go to the `slots` [N or fewer] int64 of `entries` [S, stored heads, D].
        `positions` are [N] int64. `table` comes from `Angles`: as many of a head's first columns are rotated
        as it has numbers for, and all of them if there is a norm.
        """
        rows, heads, width = qkv.shape
        head_bytes = width * qkv.element_size()
        numbers = (
            *(qkv.data_ptr(), heads * head_bytes, rows, self._rotated, width, table.shape[2]),
            *(table.data_ptr(), positions.data_ptr(), entries.data_ptr(), slots.data_ptr(), len(slots)),
            *(self._queries * head_bytes, self._stored * head_bytes, self._scale_at),
        )
        launch(self._kernel, *numbers, bits_of(1.0 / width), self._eps)


class Seen(NamedTuple):
    """What a call of attention takes from its view."""

    numbers: tuple[int, ...]
    """The numbers at the places `outrider.engine.cpu.kernels.attention.SEEN`, without the room."""
    room: tuple[int, int]
    """See `WorkerPool.room_that_grows`."""
    parts: int
    members: int
    """How many members work on the parts."""


class AttentionKernel:
    """Attention of the queries of each sequence over keys and values that lie side by side."""

    def __init__(
        self, dtype: torch.dtype, kv_heads: int, values_at: int, workers: WorkerPool | None = None
    ) -> None:
        """`values_at` is the place in an entry where its values begin: after its keys, or among them. The
        workers share the tiles."""
        from outrider.engine.cpu.kernels.attention import attention, room_bytes, tiles_of

        self._kernel, self._room_bytes, self._tiles_of = attention(kind_of(dtype)), room_bytes, tiles_of
        self._kv_heads, self._values_at = kv_heads, values_at * dtype.itemsize
        self._workers = workers or WorkerPool()

    def __call__(
        self,
        queries: Tensor,
        entries: Tensor,
        view: View,
        scale: float,
        out: Tensor,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write the attention result of queries [N, Q, D] over entries [S, numbers] to `out` [N, Q, V].

        Queries and `out` have their heads side by side. `softcap` bounds the scores by tanh; `sinks` [Q] are
        the scores of a key without a value, for each query head.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        (count, heads, width), size = queries.shape, entries.element_size()
        self._per_kv, self._head_bytes = heads // self._kv_heads, (width * size, out.shape[2] * size)
        seen = self.seen(view, count)
        numbers = (
            *(queries.data_ptr(), queries.stride(0) * size, out.data_ptr(), out.stride(0) * size),
            *(*seen.numbers[:2], entries.data_ptr(), entries.stride(0) * size, *seen.numbers[2:8]),
            *(self._kv_heads, self._per_kv, *self._head_bytes, self._values_at, *seen.numbers[8:]),
            *(*seen.room, bits_of(scale), bits_of(softcap or 0.0), 0 if sinks is None else sinks.data_ptr()),
        )
        table = array("q", numbers)
        if (under_way := recording()) is not None:
            under_way.add_attention(view, table)
        self._workers.run(self._kernel, table, seen.parts, seen.members)

    def seen(self, view: View, count: int) -> Seen:
        """Return what a call takes from its view, for the heads of the last call and `count` queries."""
        keys, (head_bytes, value_bytes) = len(view.slots) // len(view.counts), self._head_bytes
        mask = 0 if view.mask is None else view.mask.data_ptr()
        tiles = self._tiles_of(view.counts.numpy().tolist(), self._kv_heads, self._per_kv)
        read = tiles * keys * (head_bytes + value_bytes)
        members = min(self._workers.size(count), max(1, read // MIN_SHARE))
        parts = 1 if members == 1 else min(tiles, members * SHARES)
        room = self._workers.room_that_grows(self._room_bytes(head_bytes, value_bytes, keys))
        numbers = (
            *(view.counts.data_ptr(), len(view.counts), view.slots.data_ptr(), keys, mask),
            *(view.ends.data_ptr(), len(view.ends) // len(view.counts), view.open_keys, tiles, parts),
        )
        return Seen(numbers, room, parts, members)
