"""The attention of `outrider.engine.attention` by kernels, without gathering, masks in memory or work of the
host.

The step's packed buffer says what its tokens see; the kernels read it in every layer. The meaning is that of
`outrider.engine.step`; sums are computed in another order and in float32.

Shapes: N packed tokens, Q query heads, H kv heads, D and V widths of keys and values, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from outrider.engine.attention import Attention
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.gpu.accelerator import multiprocessors, overlapping
from outrider.engine.gpu.kernels.attention import attend_kernel, combine_kernel, move_kernel, store_kernel
from outrider.engine.gpu.kernels.ordered_attention import attend_in_order_kernel
from outrider.engine.gpu.layout import MOVES, BufferLayout, DeviceStep
from outrider.engine.gpu.ordered_plan import ordered_width
from outrider.engine.gpu.plan import BLOCK_KEYS, MAX_ROWS, MIN_ROWS, tile_shape, tile_width
from outrider.engine.gpu.shapes import check_rows, check_shape
from outrider.engine.loaded_model import Geometry

PROGRAMS = 4
"""Most programs of a launch per multiprocessor."""
MOVED_COLUMNS = 64
"""Columns that one program copies of all moved entries."""
WIDE = 256
"""Columns of a head from which on it is read half a block at a time, by eight warps. Tiles of wider heads
have half the rows. Otherwise registers would spill. Tiles of `deterministic` are flat: only blocks of wider
heads are halved, and eight warps compute heads of half this width."""


class _Tiles(NamedTuple):
    """Constants of the kernels for steps of some size."""

    shape: tuple[int, ...]
    """See `kernels.attention`."""
    cut: int
    rows: int
    """BLOCK_M."""


class KernelAttention(Attention):
    """Keys and values of all slots, and of one more slot that padding is written to."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ordered: bool = False,
        fp8: bool = False,
        planned: int | None = None,
    ) -> None:
        """`ordered`: a token's bits do not depend on its batch; steps are then planned by `plan_in_order`.
        `fp8`: keys and values are bytes, see `kernels.eight_bits`; tokens see their own step's as bytes too.
        Steps are planned for layers with `planned` query heads per kv head, by default as many as here.
        """
        super().__init__(geometry, num_slots + 1, torch.uint8 if fp8 else dtype, device)
        self.trash = num_slots
        """The slot that nothing reads."""
        self._page_size, self._ordered = page_size, ordered
        widths = (geometry.head_dim, geometry.value_dim)
        self._shape = (geometry.kv_heads, geometry.queries_per_kv, *widths, *map(next_power_of_2, widths))
        self._planned = planned or geometry.queries_per_kv
        widest = max(self._shape[4:])
        self._block_keys = BLOCK_KEYS // 2 if widest >= (2 * WIDE if ordered else WIDE) else BLOCK_KEYS
        self._most_rows = MIN_ROWS if ordered else MAX_ROWS // 2 if widest > WIDE else MAX_ROWS
        self._warps = 8 if widest >= (WIDE // 2 if ordered else WIDE) else 4
        self._programs = PROGRAMS * multiprocessors(device)
        self._options = overlapping(device)
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Attention.allocate`."""
        shape = (geometry.num_layers, num_slots, geometry.kv_heads)
        self.keys = torch.zeros((*shape, geometry.head_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, geometry.value_dim), dtype=dtype, device=device)

    def stores(self) -> tuple[Tensor, ...]:
        """See `Attention.stores`."""
        return self.keys, self.values

    def open_step(self, buffer: Tensor, layout: BufferLayout, wanted: int) -> DeviceStep:
        """Return a step whose buffer [words] is on the device, with memory for the parts of its tiles.

        `wanted` is W, at most the tokens that the layout holds.
        """
        return DeviceStep.with_room(buffer, layout, wanted, *self.room(layout))

    def room(self, layout: BufferLayout) -> tuple[int, int]:
        """Return the lengths of `DeviceStep.partial` and `DeviceStep.statistics`."""
        tiles = self._tiles(layout.capacity.tokens)
        rows = layout.capacity.items * tiles.shape[0] * tiles.rows
        return rows * tiles.shape[3], 2 * rows

    def place(self, layer: int) -> tuple[KernelAttention, int]:
        """Return the object that holds a layer's keys and values, and the layer's number in it."""
        return self, layer

    def move_in_step(self, step: DeviceStep) -> None:
        """Carry out the moves of a step's buffer, by one launch for each of the stores.

        torch would copy MOVES entries in every step, and cut memory of 2 GiB and more into several launches.
        """
        for entries in self.stores():
            width = entries[0, 0].numel()
            move_kernel[(len(entries), -(-width // MOVED_COLUMNS))](
                entries,
                step.buffer,
                step.layout.moves_at,
                entries.stride(0),
                WIDTH=width,
                MOVES=MOVES,
                BLOCK=MOVED_COLUMNS,
            )

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `Attention.store`."""
        step: DeviceStep = self.step
        tokens, heads = step.layout.capacity.tokens, self._shape[0]
        check_rows("key", key, tokens, heads, self._shape[2])
        check_rows("value", value, tokens, heads, self._shape[3])
        store_kernel[(tokens, heads)](
            key,
            value,
            self.keys[layer],
            self.values[layer],
            step.buffer,
            step.layout.at("slots"),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            SHAPE=self._shape,
            BLOCK=max(self._shape[4:]),
            num_warps=1,
        )

    def mix(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """See `Attention.mix`."""
        step: DeviceStep = self.step
        sinks = scores.sinks
        layout, items = step.layout, step.layout.capacity.items
        heads = self._shape[0] * self._shape[1]
        check_rows("queries", queries, layout.capacity.tokens, heads, self._shape[2])
        if sinks is not None:
            check_shape("sinks", sinks, heads)
        out = queries.new_empty((len(queries), heads, self._shape[3]))
        kernel = attend_in_order_kernel if self._ordered else attend_kernel
        tiles = self._tiles(layout.capacity.tokens)
        kernel[(min(items * tiles.shape[0], self._programs),)](
            queries,
            self.keys[layer],
            self.values[layer],
            out,
            step.partial,
            step.statistics,
            queries if sinks is None else sinks,
            step.buffer,
            layout.items_at,
            layout.tiles_at,
            layout.at("positions"),
            *(() if self._ordered else (layout.at("own"),)),
            layout.at("masks"),
            items,
            queries.stride(0),
            queries.stride(1),
            scores.scaling,
            scores.softcap or 0.0,
            SHAPE=tiles.shape,
            CUT=tiles.cut,
            BLOCK_M=tiles.rows,
            BLOCK_N=self._block_keys,
            PAGE=self._page_size,
            WINDOW=scores.window or 0,
            SOFTCAP=scores.softcap is not None,
            SINKS=sinks is not None,
            PRECISION=self._precision,
            num_warps=self._warps,
            **self._options,
        )
        self._combine(step, tiles, out)
        return out

    def _tiles(self, tokens: int) -> _Tiles:
        """Return how steps of up to `tokens` tokens are computed."""
        planned, (heads, group, *widths) = self._planned, self._shape
        width = ordered_width(planned) if self._ordered else tile_width(tokens, planned)
        # A token is not cut in steps that are planned for this layer, however many heads it has.
        cut, rows = tile_shape(width, group, max(self._most_rows, planned))
        return _Tiles((heads * cut, group // cut, *widths), cut, rows)

    def _combine(self, step: DeviceStep, tiles: _Tiles, out: Tensor) -> None:
        """Join the parts of tiles with several items, and zero the padding: out [N, Q, V]."""
        combine_kernel[tuple(out.shape[:2])](
            out,
            step.partial,
            step.statistics,
            step.buffer,
            step.layout.at("tile_of"),
            step.layout.tiles_at,
            step.layout.capacity.items,
            SHAPE=tiles.shape,
            BLOCK_M=tiles.rows,
            ORDERED=self._ordered,
            **self._options,
        )
