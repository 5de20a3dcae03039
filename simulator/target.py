"""The target as the verify service's code sees it: a runner whose forward takes time on a device.

The real page pool accounts for keys and values. The logits are 1 for the script's token and 0 elsewhere, so
that the real code chooses, walks and commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.runner import Segment
from simulator.devices import Place, StepTotals, work, work_shared
from simulator.profile import TargetTimes
from simulator.traces import Script

NOTHING = 0
"""The token that the target chooses after a wrong token; it is never committed."""


class ScriptedRunner:
    """Stands in for `ModelRunner`; `scripts` are the texts by session number."""

    def __init__(
        self,
        place: Place,
        times: TargetTimes,
        scripts: Mapping[int, Script],
        vocabulary_size: int,
        pool: PagePool,
    ) -> None:
        self.pool = pool
        self.warming_up = False
        self.totals = StepTotals()
        self._place = place
        self._times = times
        self._scripts = scripts
        self._vocabulary_size = vocabulary_size
        self._drafting = True

    def drafting(self, at_work: bool) -> None:
        """See ModelRunner. While drafts work, they use the other core."""
        self._drafting = at_work

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [W, V] of the wanted tokens, returned after the step's time has passed."""
        chosen: list[int] = []
        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
            chosen += self._choices(segment)
            segment.kv.append(segment.tokens, segment.parents)
        tokens = sum(len(segment.tokens) for segment in segments)
        seconds = self._times.forward(tokens, len(segments))
        helper = self._place.helper
        helped = 0.0
        if helper is not None:
            helped = self._times.helped(tokens, len(segments), seconds, self._drafting)
        self.totals.add(tokens, len(segments), seconds - helped / 2)
        work(self._place.core, self._times.step + self._times.session * len(segments))
        work(self._place.device, seconds - helped)
        if helper is not None and helped:
            work_shared([self._place.device, helper], helped)
        logits = torch.zeros(len(chosen), self._vocabulary_size)
        logits[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 1.0
        return logits

    def commit(self, kv: SequenceKv, keep: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep a path of scratch entries; there is nothing to copy."""
        kv.commit(keep, tokens)

    def fork(self, kv: SequenceKv) -> SequenceKv:
        """A second sequence with the same tokens."""
        return kv.fork()[0]

    def settle(self) -> None:
        """Do nothing: no move is put off."""

    def _choices(self, segment: Segment) -> list[int]:
        """The target's token after each wanted one: the script's as long as the path follows the script."""
        kv, tokens = segment.kv, segment.tokens
        if not segment.wanted:
            return []  # a piece of a prompt
        high, low = [*kv.tokens[:2], *tokens[:2]][:2]
        script = self._scripts[high * self._vocabulary_size + low].tokens
        parents = segment.parents or range(-1, len(tokens) - 1)
        ends: list[int] = []  # committed length after each token; -1 off the script
        for token, parent in zip(tokens, parents, strict=True):
            at = kv.length if parent < 0 else ends[parent]
            on_script = 0 <= at < len(script) and script[at] == token
            ends.append(at + 1 if on_script else -1)
        return [
            script[ends[place]] if 0 <= ends[place] < len(script) else NOTHING for place in segment.wanted
        ]
