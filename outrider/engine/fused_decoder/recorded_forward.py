"""The forward of a fused decoder on the CPU, recorded so that the next step of the size repeats it.

See `outrider.engine.cpu.recording`. A step's tokens, positions, slots and wanted rows are copied to fixed
places, and what its attention sees is written into the recorded tables.

Shapes: N packed tokens, W wanted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.engine.attention import PagedAttention
from outrider.engine.cpu.layer import AttentionKernel
from outrider.engine.cpu.recording import Recording, Scratch, prepare
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.features import FeatureTap
from outrider.engine.fused_decoder.decoder import FusedDecoder
from outrider.engine.fused_decoder.forward import FusedForward, Inputs
from outrider.engine.fused_decoder.rotation import Rotations
from outrider.engine.step import PackedStep
from outrider.recent import Recent

CpuForward: TypeAlias = FusedForward[Inputs, list[Rotations]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
MAX_SHORT = 64
"""Most tokens of a step that is recorded only when its size comes for the second time. In longer ones
recording takes a small share of the time, and the memory of recordings saves more."""
MAX_RECORDINGS = 512
"""Most sizes that are remembered, and their recordings. A recording takes some kilobytes a layer, and making
one as long as some forwards of a small model: so it should not be dropped before its size comes again."""


class RecordedForward:
    """Runs a forward, or repeats it."""

    def __init__(
        self,
        forward: CpuForward,
        decoder: FusedDecoder,
        attention: PagedAttention,
        workers: WorkerPool,
        tap: FeatureTap,
    ) -> None:
        assert attention.kernel is not None, "see can_be_recorded"
        self._forward, self._attention, self._workers, self._tap = forward, attention, workers, tap
        self._windows = {layer.settings.scores.window for layer in decoder.stack}
        self._scratch = Scratch()
        self._recordings = Recent[Hashable, _Recorded | None](MAX_RECORDINGS)
        """None for the size of a short step that came once."""
        self._refused: bool | None = None
        """True if torch computes a part of the model; None until something was recorded."""
        self.warming_up = False
        """True if the last step was short, and one of the first two of its size: computed, or recorded."""
        prepare()

    def __call__(self, step: PackedStep) -> Tensor:
        """Logits [W, V] of the step's wanted tokens; the next step overwrites them."""
        self.warming_up, shared = False, self._forward.begin(step)
        if self._refused or not self._can_repeat(step, shared):
            return self._forward.compute(step, shared)
        key, short = self._key(step, shared), len(step.slots) <= MAX_SHORT
        if (found := self._recordings.get(key)) is not None:
            self._recordings.move_to_end(key)
            return found.repeat(step)
        self.warming_up = short
        if short and key not in self._recordings:
            self._recordings[key] = None
            return self._forward.compute(step, shared)
        return self._record(key, step)

    def _can_repeat(self, step: PackedStep, shared: list[Rotations]) -> bool:
        whole = len(step.slots) == step.tokens.shape[1]
        return whole and not self._tap.layers and all(each.factors is None for each in shared)

    def _make_views(self, step: PackedStep) -> None:
        """Make what the layers' attention sees. It is read to the end, so the scratch must not hold it."""
        for group in step.groups:
            for window in self._windows:
                step.plain_view(group, window)

    def _key(self, step: PackedStep, shared: list[Rotations]) -> Hashable:
        tables = tuple(each.table.data_ptr() for each in shared)
        return len(step.slots), len(step.wanted), len(step.groups), self._workers.helpers_idle, tables

    def _record(self, key: Hashable, step: PackedStep) -> Tensor:
        self._make_views(step)
        places = _Places(len(step.slots), len(step.wanted))
        fixed, recording = places.of(step), Recording(self._scratch)
        shared = self._forward.begin(fixed)
        # Rotations and factors of queries are computed here: torch must not do so in what is recorded.
        alike = self._can_repeat(fixed, shared) and key == self._key(fixed, shared)
        assert alike, "the same step with its numbers in other places"
        with self._attention.during(fixed):
            logits = recording.record(lambda: self._forward.compute(fixed, shared))
        self._attention.step = step
        self._refused = bool(recording.refused)
        if not self._refused:
            assert self._attention.kernel is not None
            calls = _AttentionCalls(recording, step, self._attention.kernel)
            self._recordings[key] = _Recorded(places, calls, recording, logits, self._workers)
        return logits


def can_be_recorded(attention: object) -> bool:
    """True for attention whose calls a recording can repeat."""
    return isinstance(attention, PagedAttention) and attention.kernel is not None


class _Places:
    """Where the kernels of a recording find a step's tokens, positions and slots [N], and wanted rows [W]."""

    def __init__(self, tokens: int, wanted: int) -> None:
        self._tensors = [torch.empty(size, dtype=torch.int64) for size in (tokens, tokens, tokens, wanted)]
        self._arrays = [each.numpy() for each in self._tensors]

    def fill(self, step: PackedStep) -> None:
        """Copy a step's numbers there."""
        given = step.tokens[0], step.positions[0], step.slots, step.wanted
        for place, numbers in zip(self._arrays, given, strict=True):
            place[:] = numbers.numpy()

    def of(self, step: PackedStep) -> PackedStep:
        """Return the step with its numbers there."""
        self.fill(step)
        tokens, positions, slots, wanted = self._tensors
        return replace(step, tokens=tokens[None], positions=positions[None], slots=slots, wanted=wanted)


class _Alike(NamedTuple):
    """The calls of attention that see the same: those of all layers with a window, for a group of the
    step."""

    group: int
    window: int | None
    calls: Numbers
    """Their numbers, in the order of the forward."""


class _AttentionCalls:
    """The tables of a recording's calls of attention."""

    def __init__(self, recording: Recording, step: PackedStep, kernel: AttentionKernel) -> None:
        from outrider.engine.cpu.kernels import attention

        self._kernel, self._seen = kernel, np.array(attention.SEEN)
        self._addresses = np.array((attention.Q, attention.OUT))
        self.tables = np.array([table for _, _, table in recording.attention], dtype=np.int64)
        self.lines = np.array([line for line, _, _ in recording.attention], dtype=np.int64)
        self._alike = _alike(recording, step)
        self._strides = self.tables[:, (attention.Q_STRIDE, attention.OUT_STRIDE)]
        self._first = self.tables[:, self._addresses]
        """Addresses [calls, 2] of the queries and results of the step's first row."""
        for kind in self._alike:
            self._first[kind.calls] -= step.groups[kind.group].start * self._strides[kind.calls]

    def write(self, step: PackedStep, program: Numbers) -> None:
        """Write what a step's attention sees into the tables and the program."""
        from outrider.engine.cpu.kernels.replay import PARTS, SIZE

        groups = [step.groups[kind.group] for kind in self._alike]
        seen = [
            self._kernel.seen(step.plain_view(group, kind.window), group.stop - group.start)
            for kind, group in zip(self._alike, groups, strict=True)
        ]
        room = max((each.room for each in seen), key=itemgetter(1))  # the latest, if it has grown
        for kind, group, each in zip(self._alike, groups, seen, strict=True):
            calls, lines = kind.calls, self.lines[kind.calls]
            first = self._first[calls] + group.start * self._strides[calls]
            self.tables[calls[:, None], self._addresses] = first
            self.tables[calls[:, None], self._seen] = *each.numbers, *room
            program[lines, PARTS], program[lines, SIZE] = each.parts, each.members


def _alike(recording: Recording, step: PackedStep) -> list[_Alike]:
    views = {
        id(view): (number, window)
        for number, group in enumerate(step.groups)
        for (window, _), view in group.views.items()
    }
    found: dict[tuple[int, int | None], list[int]] = {}
    for call, (_, view, _) in enumerate(recording.attention):
        found.setdefault(views[view], []).append(call)
    return [_Alike(*kind, np.array(calls)) for kind, calls in found.items()]


class _Recorded:
    """A recording, and where it finds a step's numbers."""

    def __init__(
        self,
        places: _Places,
        attention: _AttentionCalls,
        recording: Recording,
        logits: Tensor,
        workers: WorkerPool,
    ) -> None:
        from outrider.engine.cpu.kernels.replay import TABLE

        self._places, self._attention, self._logits, self._workers = places, attention, logits, workers
        self._kept = recording.kept
        self._program: Numbers = np.array(recording.lines, dtype=np.int64)
        rows = attention.tables.ctypes.data + attention.tables.strides[0] * np.arange(len(attention.lines))
        self._program[attention.lines, TABLE] = rows
        ends = [*recording.breaks, (len(self._program), lambda: None)]
        starts = [0, *(end for end, _ in recording.breaks)]
        self._pieces = [
            (self._program[start:end], call) for start, (end, call) in zip(starts, ends, strict=True)
        ]
        """Calls of kernels, and what Python does after them."""

    def repeat(self, step: PackedStep) -> Tensor:
        """Make the calls for another step of the size."""
        self._places.fill(step)
        self._attention.write(step, self._program)
        rows = len(step.slots)
        for calls, goes_on in self._pieces:
            self._workers.replay(calls, rows)
            goes_on()
        return self._logits
