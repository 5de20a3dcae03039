"""Prompt lookup: what followed the same words before."""

from __future__ import annotations

import random

from outrider.speculation.lookup import Lookup, Proposed


def chain(proposed: list[Proposed], rank: int = 0) -> list[int]:
    """The tokens first proposed by the match of that rank."""
    return [place.token for place in proposed if place.rank == rank]


def test_continues_the_longest_match() -> None:
    """A long earlier occurrence beats a later short one; its end is repeated text."""
    found = Lookup([1, 2, 3, 4, 50, 3, 4, 60, 1, 2, 3, 4]).propose(2)
    assert found == [Proposed(-1, 50, 4, 0), Proposed(0, 3, 5, 0)]


def test_other_matches_branch_off() -> None:
    """Continuations share the nodes they have in common and split where they differ."""
    text = [1, 2, 3, 7, 8, 0, 9, 2, 3, 7, 9, 0, 1, 2, 3]
    assert Lookup(text).propose(8, max_depth=3) == [
        Proposed(-1, 7, 3, 0),
        Proposed(0, 8, 4, 0),
        Proposed(1, 0, 5, 0),
        Proposed(0, 9, 3, 1),
        Proposed(3, 0, 4, 1),
    ]


def test_nothing_repeats_nothing_is_proposed() -> None:
    """No match, no candidates; nor with an empty or tiny sequence."""
    for tokens in ([], [1], [1, 2], [1, 2, 3, 4]):
        assert Lookup(tokens).propose(8) == []


def test_a_match_that_overlaps_the_end_repeats_itself() -> None:
    """Periodic text goes on with its period."""
    assert chain(Lookup([9, 1, 2, 3, 1, 2, 3]).propose(7, max_depth=7)) == [1, 2, 3, 1, 2, 3, 1]


def test_bounds_hold() -> None:
    """Never more nodes or depth than asked for, and parents come first."""
    source = random.Random(0)
    lookup = Lookup([source.randrange(4) for _ in range(500)])
    for nodes, depth in ((0, 5), (1, 5), (7, 2), (30, 6)):
        found = lookup.propose(nodes, depth)
        assert len(found) <= nodes
        depths: list[int] = []
        for place in found:
            assert place.parent < len(depths)
            depths.append(1 + (depths[place.parent] if place.parent >= 0 else 0))
        assert max(depths, default=0) <= depth
        assert len({(place.parent, place.token) for place in found}) == len(found)


def test_appending_piecewise_is_the_same_as_at_once() -> None:
    """The index grows with the sequence."""
    source = random.Random(1)
    tokens = [source.randrange(6) for _ in range(300)]
    piecewise = Lookup(tokens[:10])
    for start in range(10, 300, 7):
        piecewise.append(tokens[start : start + 7])
    assert piecewise.propose(20) == Lookup(tokens).propose(20)


def test_match_lengths_are_true() -> None:
    """The first token of each match follows an earlier copy of that many last tokens, up to 32."""
    source = random.Random(2)
    for _ in range(50):
        tokens = [source.randrange(3) for _ in range(60)]
        for place in Lookup(tokens).propose(10, max_depth=1):
            ends = [
                end
                for end in range(place.match_length, len(tokens))
                if tokens[end - place.match_length : end] == tokens[-place.match_length :]
            ]
            assert place.token in [tokens[end] for end in ends]


def test_old_tokens_are_forgotten() -> None:
    """Memory is bounded: of more than max_tokens the older half goes, the newer half still matches."""
    lookup = Lookup([1, 2, 3, 4], max_tokens=100)
    lookup.append(list(range(1000, 1150)))
    lookup.append([1, 2, 3])
    assert lookup.propose(4) == []
    lookup.append([7, 1148, 1149])
    assert chain(lookup.propose(2)) == [1, 2]
