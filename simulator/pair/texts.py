"""Texts that a target writes after prompts, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import SamplingRow, choose
from outrider.sampling.history import History
from simulator.pair.models import read

AT_ONCE = 8
"""Texts that are written together: a step over so many costs little more than one over a single token."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the target said after a prompt, and with which seed."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class _Draft:
    """A text that is being written."""

    prompt: tuple[int, ...]
    params: SamplingParams
    kv: SequenceKv
    tokens: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """What the next token follows."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def row(self) -> SamplingRow:
        """What the choice of the next token depends on."""
        done = len(self.tokens)
        return SamplingRow(self.params, len(self.prompt) + done, done, History(self.prompt))


def write_texts(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    count: int,
    ends: Collection[int] = (),
    written: Callable[[int], None] = lambda texts: None,
) -> list[Text]:
    """A text of `count` tokens after each prompt, seeds 1, 2, ...; one of `ends` is a text's last token.

    `written` is told how many texts are complete.
    """
    texts: list[Text] = []
    for start in range(0, len(prompts), AT_ONCE):
        batch = [
            _Draft(tuple(prompt), SamplingParams(temperature=temperature, seed=seed), _read(runner, prompt))
            for seed, prompt in enumerate(prompts[start : start + AT_ONCE], start + 1)
        ]
        _write(runner, batch, count, ends)
        texts += [Text(one.prompt, tuple(one.tokens), one.params) for one in batch]
        written(len(texts))
    return texts


def _read(runner: ModelRunner, prompt: Sequence[int]) -> SequenceKv:
    """All of a prompt but its last token."""
    kv = SequenceKv.open(runner.pool, prompt, reuse=False)
    read(runner, kv, prompt[:-1])
    return kv


def _write(runner: ModelRunner, batch: Sequence[_Draft], count: int, ends: Collection[int]) -> None:
    going = list(batch)
    while going:
        logits = runner.forward([Segment(one.kv, [one.last], None, [0]) for one in going])
        for one in going:
            runner.commit(one.kv, [0], [one.last])
        for one, token in zip(going, choose(logits, [one.row for one in going], ()), strict=True):
            one.tokens.append(token)
        for one in going:
            if len(one.tokens) == count or one.tokens[-1] in ends:
                one.kv.release()
        going = [one for one in going if len(one.tokens) < count and one.tokens[-1] not in ends]
