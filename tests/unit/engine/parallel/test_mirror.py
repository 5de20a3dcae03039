"""A step goes out as one buffer and comes back as the same step."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.parallel.mirror import MAX_BATCHES, Leading, read_step, step_words
from outrider.engine.parallel.ranks import Words
from outrider.engine.step import Segment


class Sent:
    """Ranks that note what is sent."""

    def __init__(self) -> None:
        self.words: list[Words] = []

    def send(self, words: Words) -> None:
        """Note it."""
        self.words.append(words)


@pytest.fixture
def pool() -> PagePool:
    """Of pages of four tokens."""
    return PagePool(16, 4)


def test_a_step_comes_back_as_it_was(pool: PagePool) -> None:
    """Tokens, parents, wanted rows, positions, slots and what each token sees are the same."""
    kv, other = SequenceKv.open(pool, []), SequenceKv.open(pool, [])
    kv.reserve(5)
    kv.append([1, 2, 3, 4, 5], None)
    kv.commit(range(5), [1, 2, 3, 4, 5])
    kv.reserve(2)
    kv.append([7, 8], [-1, -1])
    segments = [Segment(kv, [9, 10, 11], [0, 1, 2], [2]), Segment(other, [4, 4], None, range(2))]
    for segment in segments:
        segment.kv.reserve(len(segment.tokens))
    moves = [[(1, 2), (3, 4)], [(9, 8)]]
    batches, read, whole = read_step(step_words(segments, moves, whole=True), PagePool(16, 4))
    assert (batches, whole) == (moves, True)
    for here, there in zip(segments, read, strict=True):
        assert list(there.tokens) == list(here.tokens)
        assert there.parents == here.parents
        assert list(there.wanted) == list(here.wanted)
        for segment in (here, there):
            segment.kv.append(segment.tokens, segment.parents)
        assert (there.kv.length, there.kv.scratch, there.kv.is_chain) == (
            here.kv.length,
            here.kv.scratch,
            here.kv.is_chain,
        )
        assert there.kv.slots.tolist() == here.kv.slots.tolist()
        assert there.kv.positions(0).tolist() == here.kv.positions(0).tolist()
        assert there.kv.ancestors(0).tolist() == here.kv.ancestors(0).tolist()


def test_moves_wait_for_the_next_step(pool: PagePool) -> None:
    """They go out before it, in the order of the commits, and once."""
    sent: Any = Sent()
    leading = Leading(sent)
    for moves in ([(1, 2)], [], [(2, 3)]):
        leading.move(moves)
    assert not sent.words
    kv = SequenceKv.open(pool, [])
    kv.reserve(1)
    for _ in range(2):
        leading.step([Segment(kv, [1], None, [0])], whole=False)
    assert [read_step(words, pool)[0] for words in sent.words] == [[[(1, 2)], [(2, 3)]], []]


def test_moves_do_not_wait_for_ever(pool: PagePool) -> None:
    """Sequences may be forked while nothing runs: moves then go out by themselves."""
    sent: Any = Sent()
    leading = Leading(sent)
    for _ in range(MAX_BATCHES + 1):
        leading.move([(1, 2)])
    (words,) = sent.words
    batches, segments, whole = read_step(words, pool)
    assert not whole
    assert len(batches) == MAX_BATCHES + 1
    assert segments == []


def test_an_empty_buffer_is_the_end() -> None:
    """No step is empty: it has its counts."""
    sent: Any = Sent()
    Leading(sent).end()
    assert [len(words) for words in sent.words] == [0]
    assert len(step_words([], [], whole=False)) > 0
