"""Steps as one buffer of numbers: rank 0 sends what it runs, and the other ranks run the same on their own
pages.

    number of batches of moves, number of segments, 1 if all rows reach the output layer (see `FeatureTap`)
    each batch      its length; sources, destinations
    each segment    the lengths that follow, committed entries; tokens, parents, wanted tokens, earlier
                    scratch entries' parents, pages

A step holds everything that is needed to plan it: the other ranks keep no account of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outrider.engine.kv.page_pool import PagePool
from outrider.engine.kv.pages import Move, SequenceKv
from outrider.engine.parallel.ranks import Ranks, Words
from outrider.engine.runner import ModelRunner
from outrider.engine.step import Segment

MAX_BATCHES = 1024
"""Most batches of moves that wait for a step. More are sent without one."""
_CHAIN = -1
"""Stands in place of the number of parents where each token continues the one before it."""


class Leading:
    """Sends everything that rank 0's runner does to the other ranks; see `outrider.engine.runner.Mirror`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._moves: list[Sequence[Move]] = []

    def step(self, segments: Sequence[Segment], *, whole: bool) -> None:
        """See `Mirror`. Raises LostRank when a rank is gone."""
        moves, self._moves = self._moves, []
        self._ranks.send(step_words(segments, moves, whole=whole))

    def move(self, moves: Sequence[Move]) -> None:
        """See `Mirror`."""
        if moves:
            self._moves.append(list(moves))
        if len(self._moves) > MAX_BATCHES:
            self.step([], whole=False)

    def end(self) -> None:
        """Make the other ranks leave `follow`. Raises LostRank when one is gone."""
        self._moves = []
        self._ranks.send(np.empty(0, dtype=np.int64))


def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Run every step of rank 0 until it closes.

    Raises:
        LostRank: rank 0 or another one is gone.
    """
    while len(words := ranks.receive()):
        moves, segments, whole = read_step(words, runner.pool)
        for batch in moves:
            runner.move(batch)
        if segments:
            runner.forward_with_features(segments, (runner.loaded.num_layers,) if whole else ())


def step_words(segments: Sequence[Segment], moves: Sequence[Sequence[Move]], *, whole: bool) -> Words:
    """Return a step and the batches of moves before it. Its tokens have their pages but are not appended
    yet. `whole`: features of the output layer are taken, so all rows go through the last layer."""
    numbers = [len(moves), len(segments), int(whole)]
    for batch in moves:
        numbers.append(len(batch))
        numbers.extend(source for source, _ in batch)
        numbers.extend(destination for _, destination in batch)
    for segment in segments:
        kv, parents = segment.kv, segment.parents
        counts = (len(segment.tokens), _CHAIN if parents is None else len(parents), len(segment.wanted))
        numbers += (*counts, kv.scratch, len(kv.pages), kv.length)
        for part in (segment.tokens, parents or (), segment.wanted, kv.parents, kv.pages):
            numbers.extend(part)
    return np.array(numbers, dtype=np.int64)


def read_step(words: Words, pool: PagePool) -> tuple[list[list[Move]], list[Segment], bool]:
    """Return the batches of moves, the segments and `whole` of `step_words`; `pool` says how large pages
    are."""
    left = iter(words.tolist())
    batches, segments, whole = _take(left, 3)
    moves = [_moves(left) for _ in range(batches)]
    return moves, [_segment(left, pool) for _ in range(segments)], bool(whole)


class MirroredKv(SequenceKv):
    """The part of another rank's sequence, before a step, that is needed to plan the step."""

    def __init__(self, pool: PagePool, pages: list[int], length: int, parents: Sequence[int]) -> None:
        self._length = length
        super().__init__(pool, (), pages, b"")
        self.append([0] * len(parents), parents)

    @property
    def length(self) -> int:
        """See `SequenceKv.length`."""
        return self._length


def _moves(left: Iterator[int]) -> list[Move]:
    count = next(left)
    return list(zip(_take(left, count), _take(left, count), strict=True))


def _segment(left: Iterator[int], pool: PagePool) -> Segment:
    tokens, parents, wanted, scratch, pages, length = _take(left, 6)
    ids = _take(left, tokens)
    below = None if parents == _CHAIN else _take(left, parents)
    rows, earlier = _take(left, wanted), _take(left, scratch)
    return Segment(MirroredKv(pool, _take(left, pages), length, earlier), ids, below, rows)


def _take(left: Iterator[int], count: int) -> list[int]:
    return [next(left) for _ in range(count)]
