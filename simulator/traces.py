"""The texts of a simulation: the target's tokens, and the draft's guess at every position.

They are recorded with a real pair (`simulator.record`). A session replays a piece of one trace, so easy and
hard positions follow each other as in real text, and lookup finds as much in it as in reality.
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
"""Number of candidates that are kept for every position."""
NO_RANK = CANDIDATES
"""Rank of a target's token that was not among the candidates."""
LETTERS = (digits + ascii_uppercase + ascii_lowercase)[: max(BUCKETS, CANDIDATES + 1)]
"""The letters that stand for buckets and ranks, by number."""
WIDTH = 1 + CANDIDATES
"""Number of letters per position: the rank, then the candidates' buckets."""


@dataclass(frozen=True, slots=True)
class Guess:
    """The draft's proposal at one position: the confidence bucket of each candidate, best first."""

    rank: int
    """Place of the target's token among the candidates; NO_RANK when it is not among them."""
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded text; `guesses[i]` is the draft's guess at the position of `tokens[i]`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int
    guesses: tuple[Guess, ...]

    @classmethod
    def of(
        cls, prompt: Sequence[int], tokens: Sequence[int], seed: int, rankings: Sequence[Ranking]
    ) -> Trace:
        """Make a trace from the draft's ranking at each token."""
        guesses = [_guess(ranking, token) for ranking, token in zip(rankings, tokens, strict=True)]
        return cls(tuple(prompt), tuple(tokens), seed, tuple(guesses))


@dataclass(frozen=True, slots=True)
class Corpus:
    """The traces of one pair at one temperature."""

    vocabulary_size: int
    traces: tuple[Trace, ...]

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """The guesses of all traces."""
        return tuple(guess for trace in self.traces for guess in trace.guesses)


@dataclass(frozen=True, slots=True)
class Script:
    """The text of one session: its prompt, then the target's tokens."""

    number: int
    tokens: tuple[int, ...]
    prompt_length: int
    guesses: tuple[Guess, ...]
    """Guesses by position after the prompt."""

    @property
    def generated(self) -> tuple[int, ...]:
        """The target's tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    def guess_at(self, position: int) -> Guess | None:
        """The draft's guess of the token at a position, None outside the generated text."""
        place = position - self.prompt_length
        return self.guesses[place] if 0 <= place < len(self.guesses) else None


MIN_VOCABULARY = 1024
"""Least vocabulary. It is large enough that a scripted draft's wrong candidates differ."""


def compact(traces: Sequence[Trace]) -> Corpus:
    """Texts with renumbered tokens: a small vocabulary makes simulated steps faster."""
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
    """The trace as JSON; guesses are written with a letter for the rank and one for each bucket."""
    letters = "".join(
        LETTERS[guess.rank] + "".join(LETTERS[bucket] for bucket in guess.buckets) for guess in trace.guesses
    )
    return {"prompt": trace.prompt, "seed": trace.seed, "tokens": trace.tokens, "guesses": letters}


def replay(corpus: Corpus, number: int, length: int) -> Script:
    """A script of trace `number` from its beginning, as a real request would run."""
    trace = corpus.traces[number % len(corpus.traces)]
    prompt = [*divmod(number, corpus.vocabulary_size), *trace.prompt]
    return Script(number, (*prompt, *trace.tokens[:length]), len(prompt), trace.guesses[:length])


def write_script(corpus: Corpus, number: int, prompt_length: int, length: int, random: Random) -> Script:
    """A session's text: filler and the context of a trace as prompt, then `length` tokens of the trace.

    The first two tokens encode the session's number. So no two prompts share pages, and every part of the
    simulation recognises a session by its tokens, as the services do.
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
