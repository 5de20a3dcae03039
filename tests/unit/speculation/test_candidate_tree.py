"""The candidate tree: where late blocks land, what a commit keeps, and that nothing is lost or doubled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.messages import TokenBlock
from outrider.speculation.candidate_tree import MAX_ALIASES, CandidateTree, Node


def block(first_id: int, *nodes: tuple[int, int, float]) -> TokenBlock:
    """A block of (parent, token, acceptance) nodes."""
    parents, tokens, acceptances = zip(*nodes, strict=True)
    return TokenBlock(first_id, parents, tokens, acceptances)


def shape(tree: CandidateTree) -> set[tuple[int, ...]]:
    """Every live node as the tokens of its path."""
    return {tuple(step.token for step in node.path()) for node in tree.nodes()}


def check(tree: CandidateTree) -> None:
    """The invariants that the class promises."""
    nodes = list(tree.nodes())
    assert len(nodes) == len(tree) <= tree.max_nodes
    assert len({node.id for node in nodes}) == len(nodes)
    for node in nodes:
        siblings = tree.children if node.parent is None else node.parent.children
        assert siblings[node.token] is node
        assert node.depth == len(node.path())
        expected = 1.0
        for step in node.path():
            expected *= step.acceptance
        assert node.reach == pytest.approx(expected, abs=1e-9)


@pytest.fixture
def tree() -> CandidateTree:
    """Three committed tokens and two chains that share their first node: 4-5-6 and 4-7, beside 8."""
    tree = CandidateTree([1, 2, 3], max_nodes=16)
    tree.add(block(0, (-3, 4, 0.5), (0, 5, 0.5), (1, 6, 0.5), (0, 7, 0.25), (-3, 8, 0.25)))
    return tree


def test_nodes_come_best_first_and_after_their_parents(tree: CandidateTree) -> None:
    """Iteration is depth first, with the likelier child first."""
    assert [node.token for node in tree.nodes()] == [4, 5, 6, 7, 8]


def test_commit_keeps_what_lies_below_the_last_committed_token(tree: CandidateTree) -> None:
    """Accepted nodes are walked, contradicted ones dropped, and the rest is lifted to the new root."""
    rerooted = tree.commit([4, 5])

    assert [node.token for node in rerooted.walked] == [4, 5]
    assert {node.token for node in rerooted.dropped} == {7, 8}
    assert shape(tree) == {(6,)}
    check(tree)


def test_commit_of_an_unknown_token_empties_the_tree(tree: CandidateTree) -> None:
    """A miss leaves nothing."""
    rerooted = tree.commit([4, 9])

    assert [node.token for node in rerooted.walked] == [4]
    assert len(tree) == 0
    check(tree)


def test_a_late_child_of_an_accepted_node_lands_below_the_new_root(tree: CandidateTree) -> None:
    """Ids of nodes that became committed still resolve, to their position."""
    tree.commit([4, 5])

    added = tree.add(block(5, (1, 10, 0.5)))

    assert [node.path()[0].token for node in added.nodes] == [10]
    check(tree)


def test_a_late_node_that_repeats_a_committed_token_keeps_its_children_useful(tree: CandidateTree) -> None:
    """A node that equals the committed token at its position is that position."""
    tree.commit([9, 5])

    added = tree.add(block(5, (-3, 9, 0.5), (5, 5, 0.5), (6, 11, 0.5)))

    assert (added.known, added.stale) == (2, 0)
    assert shape(tree) == {(11,)}


def test_a_late_node_that_contradicts_a_committed_token_goes_with_its_subtree(tree: CandidateTree) -> None:
    """Stale content vanishes without an error."""
    tree.commit([9, 5])

    added = tree.add(block(5, (-3, 4, 0.5), (5, 5, 0.5), (0, 12, 0.5)))

    assert (added.known, added.stale) == (0, 3)
    assert len(tree) == 0


def test_a_second_proposal_of_the_same_token_is_the_same_node(tree: CandidateTree) -> None:
    """Several drafters may propose one token; children of either name meet below one node."""
    added = tree.add(block(100, (-3, 4, 0.9), (100, 5, 0.9), (101, 13, 0.5)))

    assert (added.known, len(added.nodes)) == (2, 1)
    assert (4, 5, 13) in shape(tree)
    check(tree)


def test_a_second_name_follows_its_node_into_the_committed_tokens(tree: CandidateTree) -> None:
    """The alias of a node that was accepted afterwards resolves to its position."""
    tree.add(block(100, (-3, 4, 0.9)))
    tree.commit([4])

    tree.add(block(101, (100, 14, 0.5)))

    assert (14,) in shape(tree)


@pytest.mark.parametrize("parent", [-4, -1000, 99, 2**60])
def test_an_unknown_parent_drops_the_node(tree: CandidateTree, parent: int) -> None:
    """Anchors ahead of the committed tokens and ids never seen resolve to nothing."""
    before = shape(tree)

    added = tree.add(block(50, (parent, 4, 0.5)))

    assert added.stale == 1
    assert shape(tree) == before


def test_a_reused_id_is_dropped(tree: CandidateTree) -> None:
    """An id names one node; the second one is not believed."""
    added = tree.add(block(0, (-3, 15, 0.5)))

    assert added.stale == 1
    check(tree)


def test_a_second_name_of_a_dropped_node_is_not_that_of_another(tree: CandidateTree) -> None:
    """A draft that gives a dropped node's id to a new one adds nothing below the dropped one."""
    tree.add(block(10, (-3, 4, 0.5)))
    tree.commit([9])
    tree.add(block(0, (-4, 5, 0.5)))
    assert tree.add(block(20, (10, 6, 0.5))).stale == 1
    assert shape(tree) == {(5,)}
    check(tree)


def test_names_that_lead_to_a_dropped_node_lead_nowhere() -> None:
    """Also those of a draft that gives ids of dropped nodes to others again: no node is left beside the
    tree."""
    tree = CandidateTree([1], max_nodes=4)
    tree.add(block(5, (-1, 10, 0.5)))
    tree.add(block(9, (-1, 10, 0.5)))
    tree.commit([99])
    tree.add(block(7, (-2, 11, 0.5)))
    tree.add(block(5, (-2, 11, 0.5)))
    assert tree.add(block(20, (9, 6, 0.5))).stale == 1
    tree.commit([98])
    assert tree.add(block(21, (9, 6, 0.5))).stale == 1
    check(tree)


def test_a_child_of_a_committed_node_counts_by_itself(tree: CandidateTree) -> None:
    """However unlikely its parent was thought to be: the parent is certain now."""
    tree.add(block(10, (-3, 9, 0.0), (10, 5, 0.5), (11, 6, 0.5)))
    tree.commit([9])
    assert [node.reach for node in tree.nodes()] == [0.5, 0.25]
    check(tree)


def test_a_node_may_not_be_its_own_parent(tree: CandidateTree) -> None:
    """A self-reference is an unknown parent."""
    assert tree.add(block(70, (70, 4, 0.5))).stale == 1


def test_a_full_tree_takes_no_more(tree: CandidateTree) -> None:
    """`max_nodes` holds whatever is proposed."""
    tree.add(block(200, *[(-3, 1000 + i, 0.01) for i in range(100)]))

    assert len(tree) == 16
    check(tree)


def test_acceptances_out_of_range_are_clamped(tree: CandidateTree) -> None:
    """A draft that lies about acceptance cannot break the budget's arithmetic."""
    added = tree.add(block(300, (-3, 20, 7.0), (-3, 21, -1.0)))

    assert [node.reach for node in added.nodes] == [1.0, 0.0]


def test_old_names_are_forgotten_in_bounded_memory() -> None:
    """The number of remembered ids does not grow with the length of the text."""
    tree = CandidateTree([1], max_nodes=4)
    for i in range(MAX_ALIASES + 50):
        tree.add(block(i, (-(i + 1), 5, 0.5)))
        tree.commit([5])

    assert len(tree._aliases) == MAX_ALIASES


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_two_holders_agree_whatever_crosses_on_the_way(seed: int) -> None:
    """A tree fed with blocks late ends where a tree fed at once ends: blocks and verdicts commute."""
    rng = random.Random(seed)
    prompt, ahead, behind = [1, 2], CandidateTree([1, 2], 10_000), CandidateTree([1, 2], 10_000)
    late: list[TokenBlock] = []
    next_id = 0
    for _ in range(12):
        nodes = list(ahead.nodes())
        parent: Node | None = rng.choice([None, *nodes])
        anchor = -ahead.committed_length if parent is None else parent.id
        proposed = block(next_id, *[(anchor, rng.randrange(3), rng.random()) for _ in range(2)])
        next_id += 2
        ahead.add(proposed)
        late.append(proposed)
        if rng.random() < 0.4:
            committed = [rng.randrange(3) for _ in range(rng.randint(1, 3))]
            ahead.commit(committed)
            if rng.random() < 0.5:
                for queued in late:
                    behind.add(queued)
                late = []
            behind.commit(committed)
    for queued in late:
        behind.add(queued)

    assert prompt == ahead.committed[:2]
    assert ahead.committed == behind.committed
    assert shape(ahead) == shape(behind)
    check(ahead)
    check(behind)
