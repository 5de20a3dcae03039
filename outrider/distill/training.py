"""Trains a draft: each step lowers the divergence of its distributions from the target's.

AdamW trains all weights of the draft, or low-rank updates of them. The rate rises over the first steps and
falls to zero at the end. A checkpoint holds everything that the next step depends on, so that a run that was
stopped continues as if it had not been.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from outrider.distill.low_rank import RATE_TIMES, LowRankUpdates
from outrider.distill.models import Pair
from outrider.distill.traffic import Window
from outrider.protocol.errors import ConfigError

RATE_TIMES_WIDTH = 0.1
"""Learning rate times width of the draft: 5e-4 for 192, 1e-4 for 1,024."""
WARM_UP = 0.02
"""Share of the steps over which the rate rises."""
MAX_NORM = 1.0
"""Largest norm of a step's gradient."""
CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The length of a training, its batches and its rate."""

    passes: float
    """Number of passes over all windows."""
    seconds: float
    """Longest training in seconds, over all runs; 0: no limit."""
    batch: int
    """Windows per step."""
    rate: float
    """Learning rate; 0: derived from the draft's width."""
    rank: int = 0
    """Rank of the updates of linear layers that are trained in place of all weights; 0: all are trained."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training."""

    step: int
    steps: int
    loss: float
    """Mean divergence per token of the last step, in nats."""
    tokens_per_second: float
    """Counted tokens per second in this run."""
    seconds_left: float


class Training:
    """One training of the pair's draft.

    Raises:
        ConfigError: the rank does not fit the draft.
    """

    def __init__(
        self, pair: Pair, windows: Sequence[Window], plan: Plan, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step = 0
        self.seconds = 0.0
        """Seconds of training so far, over all runs."""
        self.steps = max(1, round(plan.passes * len(windows) / plan.batch))
        self._pair = pair
        self._windows = windows
        self._plan = plan
        self._clock = clock
        self._trained = LowRankUpdates(pair.draft, plan.rank) if plan.rank else pair.draft
        width = pair.draft.config.get_text_config().hidden_size
        self._rate = plan.rate or (RATE_TIMES if plan.rank else 1.0) * RATE_TIMES_WIDTH / width
        self._optimizer = torch.optim.AdamW(
            self._trained.parameters(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def done(self) -> float:
        """Share of the training that is done: of its steps or of its time, whichever is larger."""
        of_time = self.seconds / self._plan.seconds if self._plan.seconds else 0.0
        return max(self.step / self.steps, of_time)

    def run(self, checkpoint: Path, stopped: Callable[[], bool], say: Callable[[Progress], None]) -> bool:
        """Train until the end, or until `stopped`; returns False if stopped. The checkpoint is written when
        stopped, and every `CHECKPOINT_SECONDS`. At the end, low-rank updates are merged into the draft."""
        began, tokens = self.seconds, 0
        last, saved = self._clock(), self.seconds
        while self.done < 1.0 and not stopped():
            windows = self._portion()
            loss = self._learn(windows)
            tokens += sum(window.counted for window in windows)
            self.step += 1
            now = self._clock()
            self.seconds += now - last
            last = now
            say(self._progress(loss, tokens, self.seconds - began))
            if self.seconds - saved >= CHECKPOINT_SECONDS:
                self.save(checkpoint)
                saved = self.seconds
        self.save(checkpoint)
        if self.done < 1.0:
            return False
        if isinstance(self._trained, LowRankUpdates):
            self._trained.merge()
        return True

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        state = {
            "trained": self._trained.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        making, content = path.with_suffix(".making"), BytesIO()
        torch.save(state, content)  # it would hide why a file cannot be written
        making.write_bytes(content.getbuffer())
        os.replace(making, path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ConfigError: the checkpoint is not one of this draft.
        """
        try:
            state: dict[str, Any] = torch.load(path, map_location=self._pair.target.device, weights_only=True)
            self._trained.load_state_dict(state["trained"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
            raise ConfigError(f"--out: {str(path)!r} is no checkpoint of this draft; remove it") from error

    def _portion(self) -> list[Window]:
        """The windows of the next step; each pass has an order of its own."""
        size, first = len(self._windows), self.step * self._plan.batch
        places = range(first, first + self._plan.batch)
        return [self._windows[_order(size, place // size)[place % size]] for place in places]

    def _learn(self, windows: Sequence[Window]) -> float:
        """Train one step; returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * rate_at(self.done)
        count = sum(window.counted for window in windows)
        total = 0.0
        for part in self._pair.groups(windows):
            loss = divergence(self._pair, part) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _progress(self, loss: float, tokens: int, seconds: float) -> Progress:
        left = self.seconds * (1.0 - self.done) / self.done
        return Progress(self.step, self.steps, loss, tokens / max(seconds, 1e-9), max(left, 0.0))


def divergence(pair: Pair, windows: Sequence[Window]) -> Tensor:
    """Sum over the counted tokens of the Kullback-Leibler divergence of the draft's distribution from the
    target's, at temperature 1: a scalar that can be differentiated."""
    with torch.no_grad():
        wanted = F.log_softmax(pair.logits(pair.target, windows), -1)
    said = F.log_softmax(pair.logits(pair.draft, windows), -1)
    return F.kl_div(said, wanted, log_target=True, reduction="sum")


def rate_at(done: float) -> float:
    """Share of the full rate when the share `done` of the training is done."""
    return min((done + 0.1 * WARM_UP) / WARM_UP, 1.0, (1.0 - done) / (1.0 - WARM_UP))


@lru_cache(maxsize=2)
def _order(size: int, number: int) -> list[int]:
    """The order of `size` windows in pass `number`."""
    order = list(range(size))
    random.Random(number).shuffle(order)
    return order
