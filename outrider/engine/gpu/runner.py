"""The runner of `outrider.engine.runner` on a CUDA device: one copy to the device and one graph per step.

    pack      the step and the moves of the last commits into one pinned buffer
    copy      the used part of the buffer, without waiting
    replay    the graph of the bucket; longer steps run the same forward without a graph

Moves wait for the next step, because nothing reads keys and values before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from outrider.engine.fused_decoder import FusedDecoder, FusedForward
from outrider.engine.gpu.accelerator import memory_held, multiprocessors
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.coded_linear import compute_from_codes
from outrider.engine.gpu.graphs import (
    MAX_GRAPH_TOKENS,
    MAX_UNWANTED,
    CudaGraphs,
    Graphs,
    Replay,
    bucket_of,
    buckets_up_to,
)
from outrider.engine.gpu.layout import MOVES, BufferLayout
from outrider.engine.gpu.mixed_attention import MixedKernelAttention
from outrider.engine.gpu.one_row import OneRowForward, takes
from outrider.engine.gpu.operations import GpuOperations
from outrider.engine.gpu.ordered_plan import plan_in_order, room_for
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.gpu.staging import Staging, send_once
from outrider.engine.kv.pages import Move
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner, Segment
from outrider.engine.step import StepSize
from outrider.out_of_memory import lacks_memory

TAIL_WORDS = 1 << 18
"""Words for page tables, masks and depths in the buffer that graphs read. A step that needs more runs without
a graph."""
EAGER_MULTIPLE = 16
"""Steps without a graph are padded to a multiple of this."""


class PendingMoves:
    """Batches of moves that can be carried out together with the same effect as one after the other.

    A batch reads all its sources before it writes. Gathered batches may do so together as long as none reads
    or writes what an earlier one writes. If one does, `carry_out` first carries out the earlier ones.
    """

    def __init__(self, carry_out: Callable[[Sequence[Move]], None]) -> None:
        self._carry_out = carry_out
        self._moves: list[Move] = []
        self._written: set[int] = set()

    def add(self, moves: Sequence[Move]) -> None:
        """Gather one batch."""
        if any(source in self._written or target in self._written for source, target in moves):
            self._carry_out(self.take(len(self._moves)))
        self._moves.extend(moves)
        self._written.update(target for _, target in moves)

    def take(self, most: int) -> list[Move]:
        """Return the gathered moves for the caller to carry out; if there are more than `most`, carry them
        out here."""
        moves, self._moves = self._moves, []
        self._written = set()
        if len(moves) <= most:
            return moves
        self._carry_out(moves)
        return []


class GraphRunner(ModelRunner):
    """A loaded model on a CUDA device; see `ModelRunner`."""

    attention: KernelAttention | MixedKernelAttention

    def __init__(
        self,
        loaded: LoadedModel,
        num_pages: int,
        page_size: int,
        *,
        buckets: tuple[int, ...] = buckets_up_to(MAX_GRAPH_TOKENS),
        max_rows: int = MAX_GRAPH_TOKENS,
        graphs: Graphs | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """If `buckets` is empty, nothing is captured. Graphs compute up to `max_rows` rows of logits.
        `graphs` are CUDA's by default.
        """
        self._page_size = page_size
        self._one_row: OneRowForward | None = None
        compute_from_codes(loaded.model, True)
        super().__init__(loaded, num_pages, page_size)
        geometry, device = loaded.geometry, loaded.device
        fewest = min(shape.kv_heads for shape in geometry.parts or (geometry,))
        items = -(-2 * multiprocessors(device) // fewest)
        ordered = loaded.ordered
        self._plan = plan_in_order if ordered else plan_tiles
        items = room_for(items) if ordered else items
        self.settings = PlanSettings(
            geometry.queries_per_kv, page_size, self.attention.trash, items, ordered=ordered
        )
        # Kernels are launched on the thread's current device.
        self._on_device = torch.cuda.device_of(self.attention.stores()[0])  # type: ignore[no-untyped-call]
        self._moves = PendingMoves(self.attention.move)
        self._sizes = {bucket: StepSize(bucket, min(bucket, max_rows)) for bucket in buckets}
        self._replays: dict[StepSize, tuple[BufferLayout, Replay]] = {}
        self._results: Tensor | None = None
        """The logits of all graphs, [most rows, V], which would otherwise hold memory each."""
        if buckets:
            with self._on_device:
                self._capture(CudaGraphs(device) if graphs is None else graphs, say)

    @property
    def has_forward_of_one(self) -> bool:
        """See `ModelRunner.has_forward_of_one`."""
        return self._one_row is not None

    @property
    def row_edges(self) -> Sequence[int]:
        """See `ModelRunner`: a graph computes as many tokens as its bucket has."""
        return tuple(size.tokens for size in self._replays)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.forward`. Returns before the device has computed the logits."""
        self.append(segments)
        wanted = sum(len(segment.wanted) for segment in segments)
        with self._on_device:
            # A copy: the next replay overwrites the result, and callers may write into theirs.
            return self._run_segments(segments, wanted)[:wanted].to(torch.float32, copy=True)

    def move(self, moves: Sequence[Move]) -> None:
        """See `ModelRunner.move`; the next step carries the moves out."""
        self._moves.add(moves)

    def settle(self) -> None:
        """See `ModelRunner.settle`."""
        self._moves.take(0)

    def make_attention(self, num_slots: int) -> KernelAttention | MixedKernelAttention:
        """See `ModelRunner.make_attention`."""
        loaded = self.loaded
        kind = MixedKernelAttention if loaded.geometry.parts else KernelAttention
        return kind(
            *(loaded.geometry, num_slots, self._page_size, loaded.dtype, loaded.device),
            ordered=loaded.ordered,
            fp8=loaded.fp8_kv,
        )

    def make_fused(self, decoder: FusedDecoder) -> Callable[[Any], Tensor]:
        """See `ModelRunner.make_fused`."""
        operations = GpuOperations(decoder, self.attention)
        if takes(decoder):
            self._one_row = OneRowForward(decoder, operations)
        return FusedForward(decoder, operations, self.tap)

    def _run_segments(self, segments: Sequence[Segment], wanted: int) -> Tensor:
        """Return the logits [W with padding, V] of appended segments; the next step overwrites them."""
        size = self._padded_size(sum(len(segment.tokens) for segment in segments), wanted)
        moves = self._moves.take(MOVES)
        plan = self._plan(segments, size.tokens, self.settings)
        # The inputs of layers are taken from a forward without a graph.
        graph = None if self.tap.layers else self._replays.get(size)
        if graph is not None:
            layout, replay = graph
            words = fill(plan, layout, segments, moves, self.settings, self._staging.room)
            if len(words) <= len(self._buffer):
                self._staging.send(len(words), self._buffer)
                return replay()
        self.tap.rows = _featured(segments)
        layout = BufferLayout(plan.capacity)
        words = fill(plan, layout, segments, moves, self.settings)
        buffer = torch.empty(len(words), dtype=torch.int64, device=self.loaded.device)
        send_once(words, buffer)
        return self._compute(buffer, layout, size.rows)

    def _padded_size(self, tokens: int, wanted: int) -> StepSize:
        """Return a step's size with padding. It is the same without a graph, because another rank may have
        one."""
        bucket = bucket_of(tokens, tuple(self._sizes))
        size = None if bucket is None else self._sizes[bucket]
        if size is None or not size.rows - MAX_UNWANTED <= wanted <= size.rows:
            return StepSize(_padded(tokens), _padded(wanted))
        return size

    def _compute(self, buffer: Tensor, layout: BufferLayout, wanted: int) -> Tensor:
        """Compute the forward; everything in here is captured."""
        with torch.inference_mode():
            step = self.attention.open_step(buffer, layout, wanted)
            self.attention.move_in_step(step)
            one = layout.capacity.tokens == 1 and not self.tap.layers
            forward = self._one_row if one and self._one_row is not None else self._logits
            with self.attention.during(step):
                return forward(step)

    def _capture(self, graphs: Graphs, say: Callable[[str], None]) -> None:
        """Capture the forward of each size, the largest first: the smaller ones then fit into its memory."""
        device = self.loaded.device
        layouts = {
            size: BufferLayout(graph_capacity(size.tokens, self.settings)) for size in self._sizes.values()
        }
        words = max(layout.tail_at for layout in layouts.values()) + TAIL_WORDS
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self._staging = Staging(words, device)
        say(f"capturing {len(layouts)} graphs for steps of up to {max(self._sizes)} tokens")
        held, replays = memory_held(device), {}
        for size in sorted(layouts, key=attrgetter("tokens"), reverse=True):
            try:
                replays[size] = self._captured(size, layouts[size], graphs)
            except RuntimeError as error:  # Triton raises others, also without graphs
                if not lacks_memory(error):
                    say(f"without graphs: this model's forward cannot be captured ({error})")
                    self._results = None
                    return
                say(f"steps of {size.tokens} tokens run without a graph: no memory is left; lower kv_tokens")
        self._replays = {size: (layouts[size], replays[size]) for size in layouts if size in replays}
        say(f"{len(replays)} graphs captured; they hold {(memory_held(device) - held) >> 20} MiB")

    def _captured(self, size: StepSize, layout: BufferLayout, graphs: Graphs) -> Replay:
        nothing = self._plan([], size.tokens, self.settings)
        words = fill(nothing, layout, [], [], self.settings, self._staging.room)
        self._staging.send(len(words), self._buffer)
        return graphs.capture(lambda: self._kept(self._compute(self._buffer, layout, size.rows)))

    def _kept(self, logits: Tensor) -> Tensor:
        """Copy logits [W, V] to the memory that all graphs share: that of the first graph, which has the most
        rows."""
        if self._results is None:
            self._results = logits
        with torch.inference_mode():
            return self._results[: len(logits)].copy_(logits)


def _featured(segments: Sequence[Segment]) -> list[int]:
    """Packed positions of the tokens whose features are taken; the segments follow each other."""
    rows: list[int] = []
    start = 0
    for segment in segments:
        rows.extend(start + index for index in segment.featured)
        start += len(segment.tokens)
    return rows


def _padded(count: int) -> int:
    """Return the padded number of rows of a step without a graph."""
    return 1 if count == 1 else -(-count // EAGER_MULTIPLE) * EAGER_MULTIPLE
