"""Runs the model over many sequences at once, with keys and values in pages.

    forward(segments)   one packed forward; the tokens become scratch entries; logits of the wanted ones
    commit(kv, ...)     keeps the accepted path and compacts it to the front of the scratch
    fork(kv)            a second sequence with the same beginning

It belongs to one thread. Shapes: N packed tokens, W wanted rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from outrider.engine.attention import Attention, PagedAttention
from outrider.engine.cpu.linear import only_kernels, row_edges
from outrider.engine.features import FeatureTap
from outrider.engine.fused_decoder import FusedDecoder, FusedForward
from outrider.engine.fused_decoder.cpu_operations import CpuOperations
from outrider.engine.fused_decoder.forward import Inputs
from outrider.engine.fused_decoder.recorded_forward import RecordedForward, can_be_recorded
from outrider.engine.kv.kept_states import KeptStates
from outrider.engine.kv.page_memory import PageMemory
from outrider.engine.kv.pages import Move, PagePool, SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.own_attention import set_attention
from outrider.engine.mixed_attention import MixedAttention
from outrider.engine.recurrent.layers import RecurrentLayers, recurrent_layers
from outrider.engine.step import PackedStep, Segment, pack_step

__all__ = ["Mirror", "ModelRunner", "Segment"]


class Mirror(Protocol):
    """Other runners that do what this one does, such as those of a tensor-parallel model's other ranks."""

    def step(self, segments: Sequence[Segment], *, whole: bool) -> None:
        """Run these segments too. They have their pages, and their tokens are not appended yet. `whole`:
        features of the output layer are taken, so all rows go through the last layer."""

    def move(self, moves: Sequence[Move]) -> None:
        """Move the same entries."""

    def close(self) -> None:
        """End: no step follows."""


class ModelRunner:
    """A loaded model with its KV memory of `num_pages` pages of `page_size` tokens.

    From now on the model's attention works on this runner's memory: a model has one runner at a time.
    """

    def __init__(self, loaded: LoadedModel, num_pages: int, page_size: int) -> None:
        self.loaded = loaded
        self.tap = FeatureTap()
        self.pool = PagePool(num_pages, page_size)
        self.mirror: Mirror | None = None
        self.attention = self.make_attention(num_pages * page_size)
        self._padded = loaded.ranks > 1 or not only_kernels(loaded.model)
        self._recurrent: RecurrentLayers | None = None
        network: Any = loaded.model
        self._logits: Callable[[Any], torch.Tensor] = self._module_logits
        if isinstance(network, FusedDecoder):
            self._logits = self.make_fused(network)
        else:
            set_attention(network, self.attention.name)
            self._recurrent = recurrent_layers(network, loaded.workers)
            self.pool.kept_states = None if self._recurrent is None else KeptStates()
            self._selects_rows = "logits_to_keep" in inspect.signature(network.forward).parameters

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the segments' tokens as one packed batch; they become scratch entries of their sequences.

        Returns float32 logits [W, V]: the wanted tokens in the order of the segments. A sequence may
        occur once.

        Raises:
            OutOfPages: a sequence cannot grow. No sequence has grown, though some may have more pages
            reserved.
        """
        self.append(segments)
        step = pack_step(
            segments,
            queries_per_kv=self.loaded.geometry.queries_per_kv,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            padded=self._padded,
        )
        self.tap.rows = step.featured
        if self._recurrent is not None:
            self._recurrent.begin(segments, step.first_rows, self.loaded.device)
        wanted = sum(len(segment.wanted) for segment in segments)
        # A copy outside of inference mode: callers may write into it.
        return self._run(step)[:wanted].to(torch.float32, copy=True)

    def forward_with_features(
        self, segments: Sequence[Segment], layers: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """`forward`, and the inputs [F, C] of each of these layers at the segments' `featured` tokens.

        Raises:
            OutOfPages: see `forward`.
        """
        with self.tap.open(layers):
            return self.forward(segments), self.tap.taken

    @property
    def warming_up(self) -> bool:
        """True if later forwards of the last one's size take less time, because they are repeated."""
        return isinstance(self._logits, RecordedForward) and self._logits.warming_up

    @property
    def has_forward_of_one(self) -> bool:
        """True if a step of one token is computed by a forward of its own."""
        return False

    @property
    def row_edges(self) -> Sequence[int]:
        """Token counts beyond which a forward takes longer."""
        return row_edges(self.loaded.model)

    def candidates(self, wanted: int) -> int:
        """Return how many candidates of one sequence may be computed: `wanted`, or fewer if there is no
        memory for their states."""
        return wanted if self._recurrent is None else self._recurrent.candidates(wanted)

    def page_memory(self) -> PageMemory | None:
        """The bytes of the pages, for other replicas. None where pages do not hold all of a sequence: where
        several ranks have a part of each page, or recurrent layers have states."""
        if self.mirror is not None or self._recurrent is not None:
            return None
        return PageMemory(self.attention.stores(), self.pool.page_size)

    def settle(self) -> None:
        """Carry out the moves that commits have put off, so that pages hold what their sequences say."""

    def drafting(self, at_work: bool) -> None:
        """Note whether drafts are at work, perhaps on cores that could help this runner."""
        if self.loaded.workers is not None:
            self.loaded.workers.helpers_idle = not at_work

    def append(self, segments: Sequence[Segment]) -> None:
        """Make the segments' tokens scratch entries of their sequences.

        Raises:
            OutOfPages: see `forward`.
        """
        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
        if self.mirror is not None:
            self.mirror.step(segments, whole=self.loaded.num_layers in self.tap.layers)
        for segment in segments:
            segment.kv.append(segment.tokens, segment.parents)

    def make_attention(self, num_slots: int) -> Attention:
        """Make the attention that this runner's forwards call."""
        loaded = self.loaded
        kind = MixedAttention if loaded.geometry.parts else PagedAttention
        return kind(loaded.geometry, num_slots, loaded.dtype, loaded.device, loaded.workers)

    def make_fused(self, decoder: FusedDecoder) -> Callable[[Any], torch.Tensor]:
        """Make the forward of a fused decoder with this runner's attention: a step -> logits [W, V]."""
        assert isinstance(self.attention, PagedAttention | MixedAttention), "made for this decoder"
        forward = FusedForward(decoder, CpuOperations(decoder, self.attention), self.tap)
        workers = self.loaded.workers
        if self._padded or workers is None or not can_be_recorded(self.attention):
            return forward
        assert isinstance(self.attention, PagedAttention), "it can be recorded"
        return RecordedForward(forward, decoder, self.attention, workers, self.tap)

    def commit(
        self, kv: SequenceKv, keep: Sequence[int], tokens: Sequence[int], survivors: Sequence[int] = ()
    ) -> None:
        """Commit a path of scratch entries and make it dense; see `SequenceKv.commit`."""
        self._moved(kv.commit(keep, tokens, survivors))

    def fork(self, kv: SequenceKv) -> SequenceKv:
        """Return another sequence with the same committed tokens, which shares all full pages.

        Raises:
            OutOfPages: no page is left for the copy of the partial one.
        """
        copy, moves = kv.fork()
        self._moved(moves)
        return copy

    def move(self, moves: Sequence[Move]) -> None:
        """Copy entries between slots; all reads come before all writes."""
        self.attention.move(moves)

    def close(self) -> None:
        """Close the mirror of this runner; the last call."""
        if self.mirror is not None:
            self.mirror.close()

    def _moved(self, moves: Sequence[Move]) -> None:
        if self.mirror is not None:
            self.mirror.move(moves)
        self.move(moves)

    def _run(self, step: PackedStep) -> torch.Tensor:
        """Return the logits [W with padding, V] of a planned step."""
        with torch.inference_mode(), self.attention.during(step):
            return self._logits(step)

    def _module_logits(self, step: Inputs) -> torch.Tensor:
        options: dict[str, Any] = {"logits_to_keep": step.wanted} if self._selects_rows else {}
        if self.tap.layers:
            options["output_hidden_states"] = True
        output = self.loaded.model(
            input_ids=step.tokens, position_ids=step.positions, use_cache=False, **options
        )
        for layer in self.tap.layers:
            self.tap.take(layer, output.hidden_states[layer][0])
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_rows else logits.index_select(0, step.wanted)
