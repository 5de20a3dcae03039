"""Measures how often a draft's first choice is the target's token, when both choose with the same noise, as
in the services. This is the acceptance of a chain of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.distill.models import Pair
from outrider.distill.traffic import Window
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import choose
from outrider.sampling.history import History
from outrider.sampling.processors import SamplingRow

DRAWS = 4
"""Number of noise draws per position when tokens are sampled."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of equal choices and of all choices, by task."""

    equal: Counter[str]
    all: Counter[str]

    @property
    def mean(self) -> float:
        """The acceptance over everything that was measured."""
        return self.equal.total() / max(1, self.all.total())

    def by_task(self) -> dict[str, float]:
        """The acceptance for each traffic label."""
        return {task: self.equal[task] / count for task, count in sorted(self.all.items())}


@torch.no_grad()
def measure(pair: Pair, windows: Sequence[Window], temperature: float) -> Acceptance:
    """The acceptance of the pair's draft on windows of the target's text."""
    found = Acceptance(Counter(), Counter())
    number = 0
    for group in pair.groups(windows):
        target, draft = (pair.logits(model, group) for model in (pair.target, pair.draft))
        agreed = _agreed(target, draft, number, temperature)
        tasks = [window.task for window in group for _ in range(window.counted)]
        for task, share in zip(tasks, agreed.tolist(), strict=True):
            found.equal[task] += share
            found.all[task] += DRAWS if temperature else 1
        number += len(tasks)
    return found


def _agreed(target: Tensor, draft: Tensor, number: int, temperature: float) -> Tensor:
    """The number of draws in which both choose the same, as [N] from logits [N, V]. `number` is the number of
    the first row, which seeds its noise."""
    if not temperature:
        return (target.argmax(-1) == draft.argmax(-1)).long()
    agreed = torch.zeros(len(target), dtype=torch.long)
    for draw in range(DRAWS):
        params = SamplingParams(temperature=temperature, seed=draw)
        rows = [SamplingRow(params, number + row, 0, History(())) for row in range(len(target))]
        chosen = [torch.tensor(choose(logits, rows, ())) for logits in (target, draft)]
        agreed += chosen[0] == chosen[1]
    return agreed
