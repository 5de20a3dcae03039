"""The order in which tokens go through recurrent layers."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.recurrent.pieces import STATES_EVERY, Batch, Family, batches_of, families_of
from outrider.engine.step import Segment
from outrider.protocol.errors import InternalError

PAGE = 4
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> PagePool:
    """Room for a long text."""
    return PagePool(400, PAGE)


def appended(kv: SequenceKv, count: int, parents: list[int] | None = None, certain: int = 0) -> Segment:
    """A segment of `count` tokens that are scratch entries by now."""
    tokens = list(range(count))
    kv.reserve(count)
    kv.append(tokens, parents)
    return Segment(kv, tokens, parents, (), certain=certain)


def behind(pool: PagePool, length: int) -> SequenceKv:
    """A sequence of so many committed tokens, with states behind them."""
    kv = SequenceKv.open(pool, [])
    appended(kv, length, certain=length)
    kv.states[-1] = {0: "end"}
    kv.commit(range(length), list(range(length)))
    return kv


def rows(batches: list[Batch]) -> list[list[int]]:
    """Packed positions of each batch."""
    return [batch.rows.tolist() for batch in batches]


def test_candidates_go_level_by_level_with_those_of_other_sequences(pool: PagePool) -> None:
    """Two trees: their roots together, then all second levels."""
    first, second = behind(pool, 3), behind(pool, 5)
    segments = [appended(first, 4, [-1, 0, 0, 2]), appended(second, 2, [-1, 0])]
    assert rows(batches_of(segments, [0, 4], CPU)) == [[0, 4], [1, 2, 5], [3]]


def test_a_piece_begins_with_the_states_of_its_parent(pool: PagePool) -> None:
    """Those behind the last committed token, of a scratch entry, or of one in the same step."""
    kv = behind(pool, 3)
    (root,) = batches_of([appended(kv, 1)], [0], CPU)
    assert root.pieces[0].before == {0: "end"}
    child, grandchild = batches_of([appended(kv, 2, [0, 1])], [0], CPU)
    assert child.pieces[0].before is root.pieces[0].after
    assert grandchild.pieces[0].before is child.pieces[0].after is kv.states[1]


def paths(family: Family) -> list[tuple[int, int]]:
    """Packed position of each candidate, and its place on its path."""
    return [(piece.row, place) for piece, place in zip(family.pieces, family.places, strict=True)]


def test_candidates_of_one_state_are_a_family_depth_first(pool: PagePool) -> None:
    """Each is followed by its descendants; those behind a candidate of an earlier step are another one."""
    kv = behind(pool, 3)
    families, others = families_of(batches_of([appended(kv, 4, [-1, 0, -1, 0])], [5], CPU))
    assert not others
    assert [paths(family) for family in families] == [[(7, 0), (5, 0), (8, 1), (6, 1)]]
    assert families[0].before is kv.end_states
    families, _ = families_of(batches_of([appended(kv, 3, [1, 4, 2])], [0], CPU))
    assert [paths(family) for family in families] == [[(0, 0), (1, 1)], [(2, 0)]]
    assert [family.before for family in families] == [kv.states[1], kv.states[2]]


def test_candidates_behind_a_prompt_are_a_family_behind_its_last_piece(pool: PagePool) -> None:
    """What is certain, and what begins a text, stays in batches."""
    kv = SequenceKv.open(pool, [])
    families, others = families_of(batches_of([appended(kv, 12, certain=10)], [0], CPU))
    assert [batch.count for batch in others] == [8, 2]
    assert [paths(family) for family in families] == [[(10, 0), (11, 1)]]
    assert families[0].before is others[1].pieces[0].after
    families, others = families_of(batches_of([appended(SequenceKv.open(pool, []), 1)], [0], CPU))
    assert (families, [batch.count for batch in others]) == ([], [1])


def test_what_is_certain_goes_through_at_once_up_to_its_last_full_page(pool: PagePool) -> None:
    """A prompt of ten tokens with a candidate behind it: eight, two, one."""
    segment = appended(SequenceKv.open(pool, []), 11, certain=10)
    batches = batches_of([segment], [0], CPU)
    assert [batch.count for batch in batches] == [8, 2, 1]
    assert [batch.begins for batch in batches] == [True, False, False]
    assert [tokens.rows.tolist() for tokens in batches[1].tokens()] == [[8], [9]]


def test_a_long_prompt_is_cut_where_others_may_go_on(pool: PagePool) -> None:
    """At multiples of STATES_EVERY, wherever its pieces begin."""
    kv = behind(pool, 10)
    segment = appended(kv, 2 * STATES_EVERY, certain=2 * STATES_EVERY)
    counts = [batch.count for batch in batches_of([segment], [0], CPU)]
    assert counts == [STATES_EVERY - 10, STATES_EVERY, 8, 2]


def test_no_piece_of_a_prompt_has_one_token(pool: PagePool) -> None:
    """Nine tokens with a page's end behind the eighth: they are cut at the page before."""
    batches = batches_of([appended(SequenceKv.open(pool, []), 9, certain=9)], [0], CPU)
    assert [batch.count for batch in batches] == [4, 5]


def test_nothing_follows_the_middle_of_a_piece(pool: PagePool) -> None:
    """Nobody has its states."""
    kv = SequenceKv.open(pool, [])
    segment = appended(kv, 4, [-1, 0, 1, 1], certain=3)
    with pytest.raises(InternalError, match="no states"):
        batches_of([segment], [0], CPU)


def test_states_follow_commits_forks_and_survivors(pool: PagePool) -> None:
    """A sequence goes on from the states of its last kept entry."""
    kv = behind(pool, 3)
    batches_of([appended(kv, 4, [-1, 0, 0, 2])], [0], CPU)
    kept, survivor = kv.states[2], kv.states[3]
    kv.commit([0, 2], [0, 2], survivors=[3])
    assert kv.end_states is kept
    assert kv.states == [survivor]
    copy, _ = kv.fork()
    assert copy.end_states is kept
    kv.release()
    assert kv.end_states is None
