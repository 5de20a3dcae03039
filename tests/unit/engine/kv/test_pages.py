"""Page accounting: who holds what, what is shared, what is found again, what is taken back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.kv.page_pool import page_keys
from outrider.engine.kv.pages import Move, PagePool, SequenceKv
from outrider.protocol.errors import InternalError, OutOfPages

SIZE = 4


def prefill(pool: PagePool, tokens: list[int]) -> SequenceKv:
    """A sequence whose tokens are all committed."""
    kv = SequenceKv.open(pool, tokens)
    rest = tokens[kv.length :]
    kv.reserve(len(rest))
    kv.append(rest, None)
    kv.commit(range(len(rest)), rest)
    return kv


def run(kv: SequenceKv, tokens: list[int], parents: list[int] | None = None) -> None:
    """Append scratch entries with room for them."""
    kv.reserve(len(tokens))
    kv.append(tokens, parents)


class TestPool:
    """The pool by itself."""

    def test_allocation_is_all_or_nothing(self) -> None:
        """Too large a request raises and leaves every page where it was."""
        pool = PagePool(3, SIZE)
        pool.allocate(2)
        before = pool.statistics()
        with pytest.raises(OutOfPages, match="2 KV pages"):
            pool.allocate(2)
        assert pool.statistics() == before

    def test_pages_return_when_the_last_owner_releases_them(self) -> None:
        """A retained page outlives its first owner."""
        pool = PagePool(2, SIZE)
        pages = pool.allocate(2)
        pool.retain(pages[:1])
        pool.release(pages)
        assert pool.statistics().used == 1
        pool.release(pages[:1])
        assert pool.statistics().free == 2

    def test_released_twice_is_our_own_mistake(self) -> None:
        """The count never goes below zero."""
        pool = PagePool(1, SIZE)
        pages = pool.allocate(1)
        pool.release(pages)
        with pytest.raises(AssertionError):
            pool.release(pages)

    def test_integrity_names_a_leak(self) -> None:
        """A page that nobody owns any more is reported with its numbers."""
        pool = PagePool(2, SIZE)
        kv = prefill(pool, [1, 2, 3])
        pool.check_integrity([kv])
        with pytest.raises(InternalError, match="1 references and 0 owners"):
            pool.check_integrity([])

    def test_content_keys_depend_on_everything_before(self) -> None:
        """Equal pages after different beginnings have different keys."""
        first, second = list(page_keys([1, 2, 3, 4, 9, 9, 9, 9], SIZE))
        other = list(page_keys([5, 6, 7, 8, 9, 9, 9, 9], SIZE))
        assert first != other[0]
        assert second != other[1]
        assert list(page_keys([1, 2, 3, 4, 9], SIZE)) == [first]


class TestPrefixes:
    """Sharing of equal beginnings."""

    def test_a_live_prefix_is_shared(self) -> None:
        """A second sequence with the same beginning takes no pages for it."""
        pool = PagePool(8, SIZE)
        first = prefill(pool, list(range(10)))
        second = SequenceKv.open(pool, list(range(10)))
        assert second.length == 8
        assert second.pages == first.pages[:2]
        pool.check_integrity([first, second])

    def test_the_last_token_is_always_computed(self) -> None:
        """A prompt that is cached as a whole keeps its last page to compute, for its logits."""
        pool = PagePool(8, SIZE)
        prefill(pool, list(range(8))).release()
        assert SequenceKv.open(pool, list(range(8))).length == 4

    def test_a_released_prefix_is_found_again(self) -> None:
        """Full pages stay cached without an owner; the partial one is free at once."""
        pool = PagePool(8, SIZE)
        prefill(pool, list(range(10))).release()
        assert pool.statistics().cached == 2
        kv = SequenceKv.open(pool, [*range(8), 99])
        assert kv.length == 8
        assert pool.statistics().cached == 0
        pool.check_integrity([kv])

    def test_a_pool_without_sharing_forgets(self) -> None:
        """Pages are free as soon as their last owner goes, and a second sequence computes everything."""
        pool = PagePool(8, SIZE)
        pool.sharing = False
        prefill(pool, list(range(10))).release()
        assert pool.statistics().cached == 0
        assert SequenceKv.open(pool, list(range(10))).length == 0

    def test_the_least_recently_used_page_is_taken_first(self) -> None:
        """A new allocation evicts the older cached prefix and keeps the newer one."""
        pool = PagePool(4, SIZE)
        prefill(pool, [1] * 9).release()
        prefill(pool, [2] * 5).release()
        pool.allocate(2)
        assert SequenceKv.open(pool, [2] * 5).length == 4
        assert SequenceKv.open(pool, [1] * 9).length == 4, "of a prefix the end goes first"

    def test_committed_tokens_are_published_as_pages_fill(self) -> None:
        """Generated tokens are found too, across several commits."""
        pool = PagePool(8, SIZE)
        kv = prefill(pool, [1, 2, 3])
        for token in (4, 5, 6, 7, 8):
            run(kv, [token])
            kv.commit([0], [token])
        assert SequenceKv.open(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9]).length == 8


class TestSequence:
    """Scratch, commit, rollback and fork of one sequence."""

    def test_reserve_changes_nothing_when_pages_run_out(self) -> None:
        """The sequence can go on with what it has."""
        pool = PagePool(2, SIZE)
        kv = prefill(pool, [1, 2, 3])
        with pytest.raises(OutOfPages):
            kv.reserve(6)
        assert kv.capacity == 4
        kv.reserve(5)
        pool.check_integrity([kv])

    def test_slots_follow_the_pages(self) -> None:
        """Entry i lies at its page's place plus its offset."""
        pool = PagePool(8, SIZE)
        pool.allocate(3)
        kv = prefill(pool, list(range(6)))
        expected = [page * SIZE + offset for page in kv.pages for offset in range(SIZE)]
        assert kv.slots.tolist() == expected

    def test_positions_and_ancestors_of_a_tree(self) -> None:
        """Siblings share a position and do not see each other."""
        kv = prefill(PagePool(8, SIZE), [1, 2, 3])
        run(kv, [10, 11, 12, 13], [-1, 0, 0, 2])
        assert kv.positions(0).tolist() == [3, 4, 4, 5]
        expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
        assert kv.ancestors(0).astype(int).tolist() == expected
        assert kv.ancestors(2).astype(int).tolist() == expected[2:]

    def test_a_chain_that_branches_later(self) -> None:
        """The cheap form of a chain gives the same answers before and after it becomes a tree."""
        kv = prefill(PagePool(8, SIZE), [1])
        run(kv, [10, 11])
        assert kv.is_chain
        assert kv.ancestors(1).astype(int).tolist() == [[1, 1]]
        run(kv, [12], [0])
        assert not kv.is_chain
        assert kv.positions(0).tolist() == [1, 2, 2]
        assert kv.ancestors(0).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]

    def test_commit_moves_the_path_and_the_survivors_to_the_front(self) -> None:
        """The kept entries lie densely behind the committed ones, in order."""
        kv = prefill(PagePool(8, SIZE), [1, 2, 3])
        run(kv, [10, 11, 12, 13, 14], [-1, 0, 0, 2, 3])
        slots = kv.slots.tolist()
        moves = kv.commit([0, 2], [10, 12], survivors=[3, 4])
        assert moves == [(slots[5], slots[4]), (slots[6], slots[5]), (slots[7], slots[6])]
        assert kv.tokens == [1, 2, 3, 10, 12]
        assert (kv.scratch_tokens, kv.parents) == ([13, 14], [-1, 0])
        assert kv.positions(0).tolist() == [5, 6]
        assert kv.is_chain

    def test_commit_without_path_prunes_the_scratch(self) -> None:
        """Only survivors stay; nothing becomes committed."""
        kv = prefill(PagePool(8, SIZE), [1])
        run(kv, [10, 11, 12, 13], [-1, -1, 1, 1])
        kv.commit([], [], survivors=[1, 3, 2])
        assert kv.tokens == [1]
        assert (kv.scratch_tokens, kv.parents) == ([11, 13, 12], [-1, 0, 0])
        assert kv.ancestors(0).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]

    def test_commit_releases_what_is_not_needed(self) -> None:
        """Pages of a large rejected tree return to the pool."""
        pool = PagePool(8, SIZE)
        kv = prefill(pool, [1, 2])
        run(kv, list(range(20)))
        kv.commit([0], [0])
        assert len(kv.pages) == 1
        pool.check_integrity([kv])

    def test_rollback_forgets_the_scratch(self) -> None:
        """The sequence is what it was before the forward."""
        pool = PagePool(8, SIZE)
        kv = prefill(pool, [1, 2])
        run(kv, [10, 11, 12], [-1, -1, 0])
        kv.rollback()
        assert (kv.tokens, kv.scratch, len(kv.pages)) == ([1, 2], 0, 1)
        assert kv.is_chain

    @pytest.mark.parametrize(
        ("keep", "tokens", "survivors"),
        [
            ([1], [11], []),
            ([0, 2], [10, 12], [1]),
            ([0], [11], []),
            ([0], [10], [2]),
        ],
        ids=["not from the root", "survivor off the path", "other token", "orphan"],
    )
    def test_a_wrong_commit_changes_nothing(
        self, keep: list[int], tokens: list[int], survivors: list[int]
    ) -> None:
        """What is not a path, not its tokens or has lost its parent is refused."""
        kv = prefill(PagePool(8, SIZE), [1])
        run(kv, [10, 11, 12], [-1, 0, 1])
        with pytest.raises(InternalError):
            kv.commit(keep, tokens, survivors)
        assert (kv.tokens, kv.scratch_tokens) == ([1], [10, 11, 12])

    @pytest.mark.parametrize("parent", [1, 5, -2])
    def test_a_parent_must_come_before(self, parent: int) -> None:
        """A scratch entry names an earlier entry or the last committed token, or nothing is appended."""
        kv = prefill(PagePool(8, SIZE), [1])
        kv.reserve(2)
        with pytest.raises(InternalError, match="parent"):
            kv.append([9, 10], [-1, parent])
        assert (kv.scratch, kv.depths, kv.scratch_tokens) == (0, [], [])

    def test_entries_need_room(self) -> None:
        """Appending without a reservation is refused."""
        kv = prefill(PagePool(8, SIZE), [1, 2, 3, 4])
        with pytest.raises(InternalError, match="do not fit"):
            kv.append([10], None)

    def test_a_fork_shares_full_pages_and_copies_the_rest(self) -> None:
        """Both go on independently, and both return all they hold."""
        pool = PagePool(8, SIZE)
        kv = prefill(pool, list(range(6)))
        run(kv, [50])
        copy, moves = kv.fork()
        assert copy.pages[0] == kv.pages[0]
        assert moves == [(kv.pages[1] * SIZE + i, copy.pages[1] * SIZE + i) for i in range(2)]
        assert (copy.tokens, copy.scratch) == (list(range(6)), 0)
        pool.check_integrity([kv, copy])
        kv.release()
        copy.release()
        assert pool.statistics().used == 0

    def test_a_fork_at_a_page_boundary_copies_nothing(self) -> None:
        """All pages are full, so all are shared."""
        copy, moves = prefill(PagePool(8, SIZE), list(range(8))).fork()
        assert moves == []
        assert copy.length == 8

    def test_release_is_idempotent(self) -> None:
        """Giving back twice gives back once."""
        pool = PagePool(8, SIZE)
        kv = prefill(pool, list(range(6)))
        kv.release()
        kv.release()
        assert pool.statistics().used == 0
        pool.check_integrity([])


class PagesMachine(RuleBasedStateMachine):
    """Random sequences of operations, with a model of every slot's content."""

    @initialize(pages=st.integers(4, 24), size=st.integers(1, 5))
    def start(self, pages: int, size: int) -> None:
        """An empty pool of some shape."""
        self.pool = PagePool(pages, size)
        self.sequences: list[SequenceKv] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """By slot: the path of tokens that the entry there stands for."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        """Prefill a prompt, which may find its beginning in the cache."""
        kv = SequenceKv.open(self.pool, tokens)
        self.sequences.append(kv)
        self._forward(kv, tokens[kv.length :], None)
        if kv.scratch:
            self._carry_out(kv.commit(range(kv.scratch), tokens[kv.length :]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow_tree(self, data: st.DataObject, count: int) -> None:
        """Add scratch entries anywhere in a sequence's tree."""
        kv = data.draw(st.sampled_from(self.sequences))
        parents = [data.draw(st.integers(-1, kv.scratch + i - 1)) for i in range(count)]
        self._forward(kv, data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), parents)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Keep some path and some of what hangs below its end."""
        kv = data.draw(st.sampled_from(self.sequences))
        keep: list[int] = []
        while children := [i for i, p in enumerate(kv.parents) if p == (keep[-1] if keep else -1)]:
            if data.draw(st.booleans()):
                break
            keep.append(data.draw(st.sampled_from(children)))
        survivors: list[int] = []
        for offset, parent in enumerate(kv.parents):
            below = parent == (keep[-1] if keep else -1) or parent in survivors
            if below and data.draw(st.booleans()):
                survivors.append(offset)
        self._carry_out(kv.commit(keep, [kv.scratch_tokens[i] for i in keep], survivors))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), how=st.sampled_from(["rollback", "release", "fork"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        """Forget the scratch, the sequence, or go on as two."""
        kv = data.draw(st.sampled_from(self.sequences))
        if how == "rollback":
            kv.rollback()
        elif how == "release":
            kv.release()
            self.sequences.remove(kv)
        elif self.pool.available:
            copy, moves = kv.fork()
            self._carry_out(moves)
            self.sequences.append(copy)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Pages add up, and every slot holds the path that its sequence believes is there."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.sequences)
        for kv in self.sequences:
            paths = self._paths(kv)
            assert [self.content[slot] for slot in kv.slots[: len(paths)].tolist()] == paths
            seen = kv.ancestors(0)
            assert (seen.sum(axis=1) == np.array(kv.depths, dtype=np.int64)).all()

    def _forward(self, kv: SequenceKv, tokens: list[int], parents: list[int] | None) -> None:
        try:
            kv.reserve(len(tokens))
        except OutOfPages:
            kv.release()
            self.sequences.remove(kv)
            return
        kv.append(tokens, parents)
        for slot, path in zip(kv.slots.tolist(), self._paths(kv), strict=False):
            self.content[slot] = path

    def _carry_out(self, moves: list[Move]) -> None:
        read = [self.content[source] for source, _ in moves]
        for path, (_, destination) in zip(read, moves, strict=True):
            self.content[destination] = path

    def _paths(self, kv: SequenceKv) -> list[tuple[int, ...]]:
        paths = [tuple(kv.tokens[: i + 1]) for i in range(kv.length)]
        for token, parent in zip(kv.scratch_tokens, kv.parents, strict=True):
            before = paths[kv.length + parent] if parent >= 0 else tuple(kv.tokens)
            paths.append((*before, token))
        return paths


PagesMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
TestRandomOperations = PagesMachine.TestCase


class TestAdopted:
    """Sequences whose entries another replica computed."""

    def test_its_pages_are_found_by_nobody(self) -> None:
        """Neither those it came with nor those it adds, also after it was copied and released."""
        pool, tokens = PagePool(16, SIZE), list(range(10))
        kv = SequenceKv.adopt(pool, tokens)
        assert (kv.length, len(kv.pages)) == (10, 3)
        copy, _ = kv.fork()
        for one in (kv, copy):
            run(one, [10, 11, 12])
            one.commit(range(3), [10, 11, 12])
        assert pool.cached_prefix(range(13)) == ([], b"")
        pool.check_integrity([kv, copy])
        kv.release()
        copy.release()
        assert (pool.statistics().used, pool.statistics().cached) == (0, 0)

    def test_it_takes_nothing_where_it_does_not_fit(self) -> None:
        """All or nothing."""
        pool = PagePool(2, SIZE)
        with pytest.raises(OutOfPages):
            SequenceKv.adopt(pool, range(9))
        assert pool.statistics().free == 2
