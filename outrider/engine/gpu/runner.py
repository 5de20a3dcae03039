"""The runner of `outrider.engine.runner` on a CUDA device: one copy to the device, one graph, per step.

    pack      the step and the moves of the last commits into one pinned buffer
    copy      the used part of it, without waiting
    replay    the graph of the bucket; longer steps run the same forward without a graph

Moves wait for the next step: nothing reads keys and values before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.fused_decoder import FusedDecoder, FusedForward
from outrider.engine.gpu.accelerator import multiprocessors
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.graphs import BUCKETS, CudaGraphs, Graphs, Replay, bucket_of
from outrider.engine.gpu.layout import MOVES, BufferLayout
from outrider.engine.gpu.moves import PendingMoves
from outrider.engine.gpu.operations import GpuOperations
from outrider.engine.gpu.plan import PlanSettings, Words, fill, graph_capacity, plan_tiles
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner, Segment

TAIL_WORDS = 1 << 16
"""Room for page tables, masks and depths in the buffer that graphs read; more runs without one."""
EAGER_MULTIPLE = 16
"""Steps without a graph are padded to a multiple of this."""


class GraphRunner(ModelRunner):
    """A loaded model on a CUDA device; see `ModelRunner`."""

    attention: KernelAttention

    def __init__(
        self,
        loaded: LoadedModel,
        num_pages: int,
        page_size: int,
        *,
        buckets: tuple[int, ...] = BUCKETS,
        graphs: Graphs | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`buckets` may be empty: nothing is captured then. `graphs` are CUDA's unless given."""
        self._page_size = page_size
        super().__init__(loaded, num_pages, page_size)
        geometry, device = loaded.geometry, loaded.device
        items = -(-2 * multiprocessors(device) // geometry.kv_heads)
        self.settings = PlanSettings(geometry.queries_per_kv, page_size, self.attention.trash, items)
        self._moves = PendingMoves(self.attention.move)
        self._replays: dict[int, tuple[BufferLayout, Replay]] = {}
        if buckets:
            self._capture(buckets, CudaGraphs(device) if graphs is None else graphs, say)

    @property
    def row_edges(self) -> Sequence[int]:
        """See `ModelRunner`: a graph computes as many tokens as its bucket has."""
        return tuple(self._replays)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.forward`. Returns before the device has computed the logits."""
        self.append(segments)
        wanted = sum(len(segment.wanted) for segment in segments)
        # Kernels are launched on the thread's current device.
        with torch.cuda.device_of(self.attention.keys):  # type: ignore[no-untyped-call]
            # A copy: the next replay overwrites the result, and callers may write into theirs.
            return self._run_segments(segments, wanted)[:wanted].to(torch.float32, copy=True)

    def commit(
        self, kv: SequenceKv, keep: Sequence[int], tokens: Sequence[int], survivors: Sequence[int] = ()
    ) -> None:
        """See `ModelRunner.commit`."""
        self._moves.add(kv.commit(keep, tokens, survivors))

    def fork(self, kv: SequenceKv) -> SequenceKv:
        """See `ModelRunner.fork`."""
        copy, moves = kv.fork()
        self._moves.add(moves)
        return copy

    def make_attention(self, num_slots: int) -> KernelAttention:
        """See `ModelRunner.make_attention`."""
        loaded = self.loaded
        return KernelAttention(loaded.geometry, num_slots, self._page_size, loaded.dtype, loaded.device)

    def make_fused(self, decoder: FusedDecoder) -> Callable[[Any], Tensor]:
        """See `ModelRunner.make_fused`."""
        return FusedForward(decoder, GpuOperations(decoder, self.attention))

    def _run_segments(self, segments: Sequence[Segment], wanted: int) -> Tensor:
        """Logits [W with padding, V] of segments that are appended; overwritten by the next step."""
        tokens = sum(len(segment.tokens) for segment in segments)
        bucket = bucket_of(tokens, tuple(self._replays))
        moves = self._moves.take(MOVES)
        if bucket is not None:
            layout, replay = self._replays[bucket]
            plan = plan_tiles(segments, bucket, self.settings)
            words = fill(plan, layout, segments, moves, self.settings)
            if len(words) <= len(self._buffer):
                self._send(words, self._buffer)
                return replay()
        plan = plan_tiles(segments, _padded(tokens), self.settings)
        layout = BufferLayout(plan.capacity)
        words = fill(plan, layout, segments, moves, self.settings)
        buffer = torch.empty(len(words), dtype=torch.int64, device=self.loaded.device)
        self._send(words, buffer)
        return self._compute(buffer, layout, _padded(wanted))

    def _send(self, words: Words, buffer: Tensor) -> None:
        """Copy the words to the front of a buffer on the device.

        The pinned copy is a fresh one: an earlier step's may not have been read yet. Torch keeps such
        memory and hands it out again once it has.
        """
        source = torch.from_numpy(words)
        if buffer.is_cuda:
            source = source.pin_memory()
        buffer[: len(words)].copy_(source, non_blocking=True)

    def _compute(self, buffer: Tensor, layout: BufferLayout, wanted: int) -> Tensor:
        """The forward itself; everything that it does is captured."""
        with torch.inference_mode():
            step = self.attention.open_step(buffer, layout, wanted)
            self.attention.move_in_step(step)
            self.attention.current = step
            try:
                return self._logits(step)
            finally:
                self.attention.current = None

    def _capture(self, buckets: tuple[int, ...], graphs: Graphs, say: Callable[[str], None]) -> None:
        """Capture the forward of each bucket, the largest first: the smaller ones then fit its memory."""
        layouts = {bucket: BufferLayout(graph_capacity(bucket, self.settings)) for bucket in sorted(buckets)}
        words = max(layout.tail_at for layout in layouts.values()) + TAIL_WORDS
        self._buffer = torch.zeros(words, dtype=torch.int64, device=self.loaded.device)
        say(f"capturing graphs for steps of up to {max(buckets)} tokens")
        replays = {}
        try:
            for bucket, layout in reversed(layouts.items()):
                replays[bucket] = self._captured(bucket, layout, graphs)
        except RuntimeError as error:  # what Triton raises is none, and would come without graphs too
            say(f"without graphs: this model's forward cannot be captured ({error})")
            return
        self._replays = {bucket: (layouts[bucket], replays[bucket]) for bucket in layouts}

    def _captured(self, bucket: int, layout: BufferLayout, graphs: Graphs) -> Replay:
        nothing = plan_tiles([], bucket, self.settings)
        self._send(fill(nothing, layout, [], [], self.settings), self._buffer)
        return graphs.capture(lambda: self._compute(self._buffer, layout, bucket))


def _padded(count: int) -> int:
    """Rows of a step without a graph."""
    return -(-count // EAGER_MULTIPLE) * EAGER_MULTIPLE
