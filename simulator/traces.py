"""Text as the simulation knows it: what the target says, and what the draft makes of every position.

Recorded with a real pair (`simulator.record`). A session replays a piece of one trace, so that easy and
hard positions follow each other as they do in text, and lookup finds in it what it finds in reality.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits

from outrider.protocol.errors import ConfigError
from outrider.sampling.chooser import Ranking
from outrider.speculation.acceptance import BUCKETS

CANDIDATES = 8
"""Candidates kept of every position."""
NO_RANK = CANDIDATES
"""The target's token was not among them."""
LETTERS = (digits + ascii_uppercase + ascii_lowercase)[: max(BUCKETS, CANDIDATES + 1)]
"""A bucket or a rank is one of these letters."""
WIDTH = 1 + CANDIDATES
"""Letters per position: the rank, then the candidates' buckets."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What the draft proposes at one position: a bucket of confidence per candidate, best first."""

    rank: int
    """Place of the target's token among the candidates; NO_RANK when it is not there."""
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded text: `guesses[i]` is the draft's at the position of `tokens[i]`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int
    guesses: tuple[Guess, ...]

    @classmethod
    def of(
        cls, prompt: Sequence[int], tokens: Sequence[int], seed: int, rankings: Sequence[Ranking]
    ) -> Trace:
        """From the draft's rankings of each token."""
        guesses = [_guess(ranking, token) for ranking, token in zip(rankings, tokens, strict=True)]
        return cls(tuple(prompt), tuple(tokens), seed, tuple(guesses))


@dataclass(frozen=True, slots=True)
class Corpus:
    """The traces of one pair at one temperature."""

    vocabulary_size: int
    traces: tuple[Trace, ...]

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """Those of all traces."""
        return tuple(guess for trace in self.traces for guess in trace.guesses)


@dataclass(frozen=True, slots=True)
class Script:
    """The text of one session: its prompt, then what the target will say."""

    number: int
    tokens: tuple[int, ...]
    prompt_length: int
    guesses: tuple[Guess, ...]
    """By position behind the prompt."""

    @property
    def generated(self) -> tuple[int, ...]:
        """What the target will say."""
        return self.tokens[self.prompt_length :]

    def guess_at(self, position: int) -> Guess | None:
        """The draft's guess of the token at a position, None outside of the generated text."""
        place = position - self.prompt_length
        return self.guesses[place] if 0 <= place < len(self.guesses) else None


MIN_VOCABULARY = 1024
"""So many tokens keep a scripted draft's wrong candidates apart."""


def compact(traces: Sequence[Trace]) -> Corpus:
    """Texts with their tokens numbered anew: what a simulated step takes grows with the vocabulary."""
    numbers: dict[int, int] = {}
    for trace in traces:
        for token in (*trace.prompt, *trace.tokens):
            numbers.setdefault(token, len(numbers))
    renamed = [
        replace(
            trace,
            prompt=tuple(numbers[token] for token in trace.prompt),
            tokens=tuple(numbers[token] for token in trace.tokens),
        )
        for trace in traces
    ]
    return Corpus(max(len(numbers), MIN_VOCABULARY), tuple(renamed))


def load_corpus(path: Path, temperature: float) -> Corpus:
    """Read the traces of one temperature.

    Raises:
        ConfigError: the pair was not recorded at that temperature.
    """
    document = json.loads(path.read_text())
    recorded, wanted = document["traces"], str(float(temperature))
    if wanted not in recorded:
        raise ConfigError(f"there are no texts of temperature {wanted}; use one of {', '.join(recorded)}")
    return Corpus(document["vocabulary_size"], tuple(_decode(entry) for entry in recorded[wanted]))


def encode(trace: Trace) -> dict[str, object]:
    """The trace as JSON; of the guesses a letter each for rank and buckets."""
    letters = "".join(
        LETTERS[guess.rank] + "".join(LETTERS[bucket] for bucket in guess.buckets) for guess in trace.guesses
    )
    return {"prompt": trace.prompt, "seed": trace.seed, "tokens": trace.tokens, "guesses": letters}


def replay(corpus: Corpus, number: int, length: int) -> Script:
    """The trace of that number from its beginning, as a real request for it would go."""
    trace = corpus.traces[number % len(corpus.traces)]
    prompt = [*divmod(number, corpus.vocabulary_size), *trace.prompt]
    return Script(number, (*prompt, *trace.tokens[:length]), len(prompt), trace.guesses[:length])


def write_script(corpus: Corpus, number: int, prompt_length: int, length: int, random: Random) -> Script:
    """A session's text: filler and the context of a trace as prompt, then `length` tokens of it.

    The first two tokens are the session's number: no two prompts share pages, and every part of the
    simulation knows a session by its tokens, as the services do.
    """
    trace = random.choice(corpus.traces)
    start = random.randrange(max(len(trace.tokens) - length, 0) + 1)
    tokens, guesses = list(trace.tokens[start:]), list(trace.guesses[start:])
    while len(tokens) < length:
        more = random.choice(corpus.traces)
        tokens += more.tokens
        guesses += more.guesses
    context = [*trace.prompt, *trace.tokens[:start]][-max(prompt_length - 2, 1) :]
    filler = [random.randrange(corpus.vocabulary_size) for _ in range(prompt_length - 2 - len(context))]
    prompt = [*divmod(number, corpus.vocabulary_size), *filler, *context]
    return Script(number, (*prompt, *tokens[:length]), len(prompt), tuple(guesses[:length]))


def _guess(ranking: Ranking, token: int) -> Guess:
    rank = ranking.tokens.index(token) if token in ranking.tokens else NO_RANK
    return Guess(rank, tuple(ranking.buckets))


def _decode(entry: dict[str, object]) -> Trace:
    letters = str(entry["guesses"])
    rows = [_row(letters[start : start + WIDTH]) for start in range(0, len(letters), WIDTH)]
    return Trace(tuple(entry["prompt"]), tuple(entry["tokens"]), int(str(entry["seed"])), tuple(rows))  # type: ignore[arg-type]


@cache
def _row(letters: str) -> Guess:
    values = [LETTERS.index(letter) for letter in letters]
    return Guess(values[0], tuple(values[1:]))
