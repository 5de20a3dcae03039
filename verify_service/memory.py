"""Decides who gets KV pages when there are not enough for all.

Seniority is priority first, then age. A step's works take their pages in that order. When pages run out,
those that no running session needs are released first: kept sequences of earlier turns, then finished
sessions that are not closed yet. Next the work itself loses its nodes, and then the most junior session is
*paused*: its pages are released, its tokens kept, and it is computed again once it fits. So the most senior
session always goes on. A session that does not fit into the whole pool is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.protocol.errors import OutOfPages
from verify_service.scheduler import Work
from verify_service.session import VerifySession


def seniority(session: VerifySession) -> tuple[int, int]:
    """Sorting key that puts the most senior session first."""
    return -session.opening.priority, session.id


class Memory:
    """Gives pages to sessions. `release_kept` releases one kept sequence, or returns False if there is
    none."""

    def __init__(self, pool: PagePool, release_kept: Callable[[], bool]) -> None:
        self.pool = pool
        self._release_kept = release_kept

    def check_fits(self, tokens: int) -> None:
        """Refuse a sequence that the whole pool could not hold.

        Raises:
            OutOfPages: the sequence can never fit.
        """
        needed = self._pages(tokens)
        if needed > self.pool.num_pages:
            raise OutOfPages(
                f"the sequence needs {needed} KV pages of {self.pool.page_size} tokens and there are "
                f"{self.pool.num_pages} in all; shorten it or raise kv_tokens"
            )

    def make_room(self, tokens: int, sessions: Sequence[VerifySession]) -> None:
        """Release sequences that no running session needs until one of `tokens` tokens fits in addition to
        the sessions.

        Raises:
            OutOfPages: it does not fit.
        """
        self.check_fits(tokens)
        needed = self._pages(tokens) + self._promised(sessions)
        while needed > self.pool.available and self._release_spare(sessions):
            pass
        if needed > self.pool.available:
            raise OutOfPages(
                f"{self._pages(tokens)} KV pages of {self.pool.page_size} tokens are needed beside the open "
                f"sessions and {self.pool.available} are available; retry later or raise kv_tokens"
            )

    def resume(self, sessions: Sequence[VerifySession]) -> None:
        """Reopen the paused sessions that fit, strictly in the order of seniority."""
        paused = [session for session in sessions if session.kv is None and not session.finished]
        for session in sorted(paused, key=seniority):
            needed = min(self._wanted(session), self.pool.num_pages) + self._promised(sessions)
            while needed > self.pool.available and self._release_spare(sessions):
                pass
            if needed > self.pool.available:
                return
            session.kv = SequenceKv.open(self.pool, session.tree.committed, max_cached=session.reusable)

    def reserve(
        self, works: Sequence[Work], sessions: Sequence[VerifySession]
    ) -> tuple[list[Work], list[VerifySession]]:
        """Reserve pages for a step; return the works that got their pages and the sessions that were
        paused."""
        holders = sorted((s for s in sessions if s.kv is not None and not s.finished), key=seniority)
        paused: list[VerifySession] = []
        for work in sorted(works, key=lambda work: seniority(work.session)):
            while work.session.kv is not None and not self._try_reserve(work, sessions):
                paused.append(holders.pop())
                paused[-1].release_pages()
        return [work for work in works if work.session.kv is not None], paused

    def _try_reserve(self, work: Work, sessions: Sequence[VerifySession]) -> bool:
        kv = work.session.kv
        assert kv is not None
        while True:
            try:
                kv.reserve(work.tokens)
            except OutOfPages:
                if self._release_spare(sessions):
                    continue
                if not work.nodes:
                    return False
                work.nodes.clear()
            else:
                return True

    def _release_spare(self, sessions: Sequence[VerifySession]) -> bool:
        """Release one sequence that no running session needs; return False if there is none."""
        if self._release_kept():
            return True
        spare = next((s for s in sessions if s.finished and s.kv is not None), None)
        if spare is not None:
            spare.release_pages()
        return spare is not None

    def _promised(self, sessions: Sequence[VerifySession]) -> int:
        """Return the pages that open sessions still need for the tokens they have, such as the rest of a
        prompt."""
        return sum(
            max(self._wanted(session) - len(session.kv.pages), 0)
            for session in sessions
            if session.kv is not None and not session.finished
        )

    def _wanted(self, session: VerifySession) -> int:
        return self._pages(session.tree.committed_length + session.max_nodes)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)
