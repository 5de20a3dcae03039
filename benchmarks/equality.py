"""Compares the texts of all arms, and judges whether rounding explains where they differ.

Greedy texts of all own arms must be those of plain `transformers`; sampled texts, of one seed, those of the
target alone. Arithmetic of few bits makes exceptions: engines sum in other orders, so two tokens that the
target finds equally good may change places. The first difference of two texts is therefore replayed with
`transformers` at the same prefix, in the arithmetic of the run and in a more precise one:

    e      largest difference of both over the 64 best tokens: the rounding error at this place
    score  precise logit, divided by the temperature, plus the sampling noise where tokens are sampled

Each engine may move a logit by e, so a token can win whose score is up to 2 e (÷ temperature) below the best.
A difference is a *near-tie* when both tokens are that close to the best score. Any other is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.arms.base import OWN, REFERENCE
from benchmarks.pairs import Pair
from benchmarks.samples import Batch
from benchmarks.workers.hf import load_reference
from benchmarks.workload import SEED, Tokens, Workload
from outrider.sampling.noise import gumbel

BEST = 64
"""Best tokens whose logits are compared."""
PRECISE = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64}


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """The first token in which a text is not the reference's."""

    prompt: int
    temperature: float
    prefix: Tokens
    """New tokens that both texts begin with."""
    expected: int
    actual: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """A difference, and whether rounding explains it."""

    difference: Difference
    distance: float
    """Distance of the worse of both tokens from the best score, in logits (÷ temperature)."""
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """True if rounding explains the difference."""
        return self.distance <= self.tolerance


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when the texts are equal.

    Raises:
        ValueError: the lengths differ, which no rounding explains.
    """
    if len(expected) != len(actual):
        raise ValueError(f"{len(expected)} tokens were expected and {len(actual)} came")
    pairs = enumerate(zip(expected, actual, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


def texts(batches: Iterable[Batch]) -> Iterator[tuple[Batch, int, Tokens]]:
    """Every text, as (batch, number of its prompt, tokens)."""
    for batch in batches:
        for prompt, request in zip(batch.turn.prompts, batch.requests, strict=True):
            yield batch, prompt, request.tokens


def references(batches: Sequence[Batch], kinds: dict[str, str]) -> dict[tuple[float, int], Tokens]:
    """The text to expect by (temperature, prompt): greedy that of the reference peer, else that of `off`.

    The text of the smallest batch counts, for it was computed without padding.
    """
    found: dict[tuple[float, int], tuple[tuple[int, int], Tokens]] = {}
    for batch, prompt, tokens in texts(batches):
        greedy = batch.turn.cell.temperature == 0
        if not (batch.arm == "off" or (greedy and kinds[batch.arm] == REFERENCE)):
            continue
        key = batch.turn.cell.temperature, prompt
        order = int(batch.arm == "off" and greedy), batch.turn.cell.concurrency
        if key not in found or order < found[key][0]:
            found[key] = order, tokens
    return {key: tokens for key, (_, tokens) in found.items()}


@dataclass(frozen=True, slots=True)
class EqualityTally:
    """Counts of an arm's texts at one temperature: all, and those equal to the reference's."""

    equal: int = 0
    texts: int = 0


def compare(
    batches: Sequence[Batch], kinds: dict[str, str]
) -> tuple[dict[tuple[str, float], EqualityTally], set[Difference]]:
    """Tallies by (arm, temperature), and the differences that have to be judged: those of own arms and of
    the reference peer, which also ran in padded batches. Peers sample with noise of their own, so their
    sampled texts are not compared.
    """
    expected = references(batches, kinds)
    tallies: dict[tuple[str, float], EqualityTally] = {}
    differences: set[Difference] = set()
    for batch, prompt, tokens in texts(batches):
        temperature, own = batch.turn.cell.temperature, kinds[batch.arm] == OWN
        reference = expected.get((temperature, prompt))
        if reference is None or not (own or temperature == 0):
            continue
        # A peer may keep tokens to itself: llama.cpp does so with the bytes of an unfinished character.
        short = len(tokens) < len(reference) and kinds[batch.arm] not in (OWN, REFERENCE)
        at = len(tokens) if short else first_difference(reference, tokens)
        old = tallies.get((batch.arm, temperature), EqualityTally())
        tallies[batch.arm, temperature] = EqualityTally(old.equal + (at is None), old.texts + 1)
        if at is not None and kinds[batch.arm] in (OWN, REFERENCE):
            differences.add(Difference(prompt, temperature, reference[:at], reference[at], tokens[at]))
    return tallies, differences


def judge_logits(
    difference: Difference, run: torch.Tensor, precise: torch.Tensor, noise: torch.Tensor
) -> Judgement:
    """Judge by the logits [vocabulary] of both arithmetics and the noise [vocabulary], zero when greedy."""
    scale = difference.temperature or 1.0
    scores = precise.double() / scale + noise
    best = scores.topk(min(BEST, len(scores))).indices
    error = (run.double() - precise.double())[best].abs().max().item() / scale
    top = scores.max().item()
    distance = max(top - scores[token].item() for token in (difference.expected, difference.actual))
    return Judgement(difference, distance, 2 * error)


class ReferenceReplay:
    """The target by `transformers`, in the arithmetic of the run and in a more precise one."""

    def __init__(self, pair: Pair) -> None:
        run = getattr(torch, pair.dtype)
        self._run = load_reference(pair.target, run, run, pair.weights)
        self._precise = load_reference(pair.target, run, PRECISE[pair.dtype], pair.weights)

    def judge(self, workload: Workload, difference: Difference) -> Judgement:
        """Compute the logits after the common beginning, and judge."""
        tokens = [*workload.prompts[difference.prompt], *difference.prefix]
        run, precise = (self._logits(model, tokens) for model in (self._run, self._precise))
        noise = torch.zeros(len(run), dtype=torch.float64)
        if difference.temperature:
            noise = gumbel(SEED, len(tokens), torch.arange(len(run)))
        return judge_logits(difference, run, precise, noise)

    @staticmethod
    def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
        return logits


def judge_all(pair: Pair, workload: Workload, differences: Iterable[Difference]) -> list[Judgement]:
    """Replay every difference; loads the target only if there are any."""
    wanted = sorted(differences)
    if not wanted:
        return []
    replay = ReferenceReplay(pair)
    return [replay.judge(workload, difference) for difference in wanted]
