"""The work of a layer between its products: norms, activation, rotation, attention.

Shapes: N rows, C their width, Q query heads, H kv heads, D head width, S slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.panels import STEP_BYTES

MIN_POSITIONS = 4096
"""Positions whose angles are worked out at once; more are when they occur."""


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """True when the kernels take tensors of this dtype and device."""
    return device.type == "cpu" and vector_backend(dtype) is not None


def attends(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True when `AttentionKernel` takes heads of this width."""
    return runs(dtype, device) and width * dtype.itemsize % STEP_BYTES == 0


class KernelView(Protocol):
    """What the kernel needs of `outrider.engine.step.View`."""

    @property
    def slots(self) -> Tensor:
        """[B * L] int64, the keys and values of each sequence."""

    @property
    def mask(self) -> Tensor | None:
        """[B, 1, rows, L] float32 added to the scores; the first rows are those of the sequence's tokens."""

    @property
    def counts(self) -> Tensor:
        """[B] int64, the tokens of each sequence, which follow each other; none is empty."""

    @property
    def ends(self) -> Tensor:
        """[B * rows] int64, the number of keys up to the last one that a row sees."""

    @property
    def open_keys(self) -> int:
        """How many of the first keys nothing hides; fewer than L if there is a mask."""


class NormKernel:
    """RMS norm of rows [N, C] of `dtype`, the weight's unless given, with a weight [C]."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        self._scale = weight.float().contiguous()
        self._at, self._width = self._scale.data_ptr(), weight.shape[-1]
        self._share, self._eps = 1.0 / self._width, eps
        from outrider.engine.cpu.kernels.norm import norm

        self._kernel = norm(_kind(weight.dtype if dtype is None else dtype))

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
        self._kernel(x.data_ptr(), added, self._at, y.data_ptr(), width, width, rows, self._share, self._eps)
        return y

    def inside(self, x: Tensor) -> None:
        """Normalise rows [N, C], whose numbers follow each other, where they are."""
        at, stride = x.data_ptr(), x.stride(0)
        assert x.stride(1) == 1, "a row is in one piece"
        self._kernel(at, 0, self._at, at, self._width, stride, len(x), self._share, self._eps)


class LayerNormKernel(NormKernel):
    """The same of rows from which their mean was subtracted, with a bias [C] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> None:
        super().__init__(weight, eps, dtype)
        self._shift = None if bias is None else bias.float().contiguous()
        self._shift_at = 0 if self._shift is None else self._shift.data_ptr()
        from outrider.engine.cpu.kernels.norm import layer_norm

        self._kernel = layer_norm(_kind(dtype))

    def _run(self, x: Tensor, added: int) -> Tensor:
        y, rows = torch.empty_like(x), x.numel() // self._width
        addresses = x.data_ptr(), added, self._at, self._shift_at, y.data_ptr()
        self._kernel(*addresses, self._width, rows, self._share, self._eps)
        return y


class GeluKernel:
    """GELU of numbers of `dtype` where they are, or its approximation with tanh."""

    def __init__(self, dtype: torch.dtype, *, tanh: bool) -> None:
        from outrider.engine.cpu.kernels.activation import gelu, gelu_tanh

        self._kernel = (gelu_tanh if tanh else gelu)(_kind(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """x, contiguous, which is overwritten."""
        self._kernel(x.data_ptr(), x.numel())
        return x


class Angles:
    """Cosines and sines of the positions that occurred, times `stretch`."""

    def __init__(self, frequencies: Tensor, stretch: float) -> None:
        self.frequencies, self.stretch = frequencies.float(), stretch
        self._table = torch.empty(0)

    def table(self, positions: Tensor) -> Tensor:
        """[more than the largest position, 2, R / 2] float32, R the columns of a head that turn."""
        if (last := int(positions.max())) >= len(self._table):
            count = max(MIN_POSITIONS, 1 << last.bit_length())
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self.frequencies
            self._table = torch.stack((angles.cos(), angles.sin()), 1).mul_(self.stretch)
        return self._table


class RotationKernel:
    """Rotation of queries and keys, perhaps with a norm over each head, and storing keys and values."""

    def __init__(
        self, dtype: torch.dtype, query_heads: int, kv_heads: int, weight: Tensor | None, eps: float
    ) -> None:
        """`weight` of the norm is [Q + H, D], or [D] for all."""
        from outrider.engine.cpu.kernels.rotation import rotation

        self._queries, self._rotated = query_heads, query_heads + kv_heads
        self._stored = 2 * kv_heads
        self._kernel = rotation(_kind(dtype))
        self._scale = None if weight is None else weight.float().expand(self._rotated, -1).contiguous()
        self._scale_at, self._eps = 0 if self._scale is None else self._scale.data_ptr(), eps

    def __call__(
        self, qkv: Tensor, table: Tensor, positions: Tensor, entries: Tensor | None, slots: Tensor
    ) -> None:
        """Rotate qkv [N, Q + 2 H, D], contiguous, where it is; write keys and values of the first ones.

        `entries` [S, 2 H, D], whose `slots` [N or fewer] int64 they go to, may be missing. `positions` are
        [N] int64, `table` is of `Angles`: the first columns of a head turn, as many as it has numbers for,
        and all where there is a norm.
        """
        rows, heads, width = qkv.shape
        head_bytes = width * qkv.element_size()
        self._kernel(
            qkv.data_ptr(),
            heads * head_bytes,
            rows,
            self._rotated,
            width,
            table.shape[2],
            table.data_ptr(),
            positions.data_ptr(),
            0 if entries is None else entries.data_ptr(),
            slots.data_ptr(),
            0 if entries is None else len(slots),
            self._queries * head_bytes,
            self._stored * head_bytes,
            self._scale_at,
            1.0 / width,
            self._eps,
        )


class AttentionKernel:
    """Attention of the queries of each sequence over keys and values that lie side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        from outrider.engine.cpu.kernels.attention import attention, room_bytes

        self._kernel, self._room_bytes = attention(_kind(dtype)), room_bytes
        self._room = torch.empty(0)

    def __call__(self, queries: Tensor, entries: Tensor, view: KernelView, scale: float, out: Tensor) -> None:
        """Write what queries [N, Q, D] see of entries [S, 2 H, D] to `out` [N, Q, D].

        Queries and `out` have their heads side by side.
        """
        kv_heads, (_, heads, width), size = entries.shape[1] // 2, queries.shape, entries.element_size()
        keys = len(view.slots) // len(view.counts)
        if self._room.nbytes < (room := self._room_bytes(width * size, keys)):
            self._room = torch.empty(room // 2)  # twice as much
        self._kernel(
            queries.data_ptr(),
            queries.stride(0) * size,
            out.data_ptr(),
            out.stride(0) * size,
            view.counts.data_ptr(),
            len(view.counts),
            entries.data_ptr(),
            2 * kv_heads * width * size,
            view.slots.data_ptr(),
            keys,
            0 if view.mask is None else view.mask.data_ptr(),
            view.ends.data_ptr(),
            len(view.ends) // len(view.counts),
            view.open_keys,
            kv_heads,
            heads // kv_heads,
            width * size,
            scale,
            self._room.data_ptr(),
        )


def _kind(dtype: torch.dtype) -> str:
    """What kernels call it."""
    return str(dtype).removeprefix("torch.")
