"""Generates the texts that a target writes after prompts, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import SamplingRow, choose
from outrider.sampling.history import History
from simulator.pair.models import read

AT_ONCE = 8
"""Number of texts that are written together. A step over as many tokens costs little more than over one."""


@dataclass(frozen=True, slots=True)
class Text:
    """The target's tokens after a prompt, and the parameters that they were sampled with."""

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
        """The token before the next one."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def row(self) -> SamplingRow:
        """The sampling row of the next token."""
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
    """A text of `count` tokens after each prompt, with seeds 1, 2, ...; a token of `ends` ends a text early.

    `written` is called with the number of complete texts.
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


def with_room(texts: Iterable[Text], tokens: int, runner: ModelRunner) -> list[Text]:
    """The texts, with prompts cut where the model's context has no room for `tokens` more."""
    longest = max(runner.loaded.context_length - tokens, 1)
    return [replace(text, prompt=text.prompt[:longest]) for text in texts]


def _read(runner: ModelRunner, prompt: Sequence[int]) -> SequenceKv:
    """A sequence with all of a prompt except its last token."""
    kv = SequenceKv.open(runner.pool, [])
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
