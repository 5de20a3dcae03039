"""Compiled grammars for an engine: made in a thread of their own, kept for the requests that come again.

The library frees the interpreter's lock while it compiles; reading the source keeps it for some milliseconds
of a large one. What comes here an orchestrator has checked in a process that may die of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from outrider.grammar.compiling import compiled
from outrider.grammar.matcher import Matcher, replay
from outrider.protocol.constraint import Constraint
from outrider.protocol.errors import InvalidRequest

MAX_CACHED = 64
MAX_CACHED_BYTES = 2 << 20
"""Most bytes of the cached constraints' texts."""
STACK_BYTES = 64 << 20
"""The library recurses along the grammar, and the orchestrators checked it on a stack of 8 MiB."""
NO_VOCABULARY = "the model came without a tokenizer that constraints can be held with; leave it out"

_T = TypeVar("_T")


class GrammarCache:
    """Compiled grammars by the digest of their constraint; the least recently used is forgotten."""

    def __init__(self, max_entries: int = MAX_CACHED, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes) -> LLMatcher | None:
        """A matcher at the beginning of the text; to be copied."""
        found = self._kept.get(digest)
        if found is None:
            return None
        self._kept.move_to_end(digest)
        return found[0]

    def keep(self, digest: bytes, matcher: LLMatcher, size: int) -> None:
        """Remember a matcher whose constraint has so many bytes."""
        self.forget(digest)
        self._kept[digest] = matcher, size
        self.bytes += size
        while len(self._kept) > self._max_entries or self.bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def forget(self, digest: bytes) -> None:
        """Drop what is kept under a digest, if anything is."""
        _, size = self._kept.pop(digest, (None, 0))
        self.bytes -= size


async def matcher_of(
    compiler: GrammarCompiler | None, constraint: Constraint | None, generated: Sequence[int]
) -> Matcher | None:
    """Where a session's text is in its grammar, if it has one; `generated` are the tokens of it so far.

    Raises:
        InvalidRequest: see `GrammarCompiler.matcher`; or there is a constraint and no compiler.
    """
    if constraint is None:
        return None
    if compiler is None:
        raise InvalidRequest(constraint.field, NO_VOCABULARY)
    return await compiler.matcher(constraint, generated)


class GrammarCompiler:
    """Makes the matchers of one replica's sessions; its methods are for the event loop."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._cache = GrammarCache()
        self._worker = _Worker()

    async def matcher(self, constraint: Constraint, generated: Sequence[int]) -> Matcher:
        """A matcher after the tokens that are generated already, with the next mask ready.

        Raises:
            InvalidRequest: the constraint is wrong, or too costly; or these tokens do not follow it, or are
                all that it allows.
        """
        digest = constraint.digest
        base = self._cache.find(digest)
        if base is None:
            base = await self._worker.do(lambda: compiled(constraint, self._vocabulary))
            self._cache.keep(digest, base, constraint.size)
        try:
            return await self._worker.do(lambda: _begun(base, constraint, generated))
        except InvalidRequest:
            self._cache.forget(digest)
            raise

    def forget(self, constraint: Constraint) -> None:
        """Compile it anew when it comes again: its memory is used up."""
        self._cache.forget(constraint.digest)


def _begun(base: LLMatcher, constraint: Constraint, generated: Sequence[int]) -> Matcher:
    matcher = Matcher(base.deep_copy())
    followed = replay(matcher, generated)
    if followed < len(generated):
        raise InvalidRequest("token_ids", f"generated token {followed} does not follow {constraint.field}")
    if matcher.complete:
        raise InvalidRequest("token_ids", f"are all that {constraint.field} allows; nothing follows them")
    if problem := matcher.settle():
        raise InvalidRequest(constraint.field, problem)
    return matcher


class _Worker:
    """A thread with a deep stack, started when it is first needed; it ends with the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = False

    async def do(self, work: Callable[[], _T]) -> _T:
        """What the work returns or raises; jobs are done in order."""
        if not self._started:
            self._start()
        done: Future[_T] = Future()

        def job() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # it belongs to whoever asked
                    done.set_exception(error)

        self._jobs.put(job)
        return await asyncio.wrap_future(done)

    def _start(self) -> None:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(usual)
        self._started = True

    def _run(self) -> None:
        while True:
            self._jobs.get()()
