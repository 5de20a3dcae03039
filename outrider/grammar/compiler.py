"""Compiled grammars for an engine: compiled in a thread of their own, and cached for later requests.

The library releases the interpreter's lock while it compiles, but holds it for some milliseconds while it
reads a large source. An orchestrator has checked every constraint before, in a process that may crash.
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
from outrider.grammar.vocabulary import load_vocabulary
from outrider.protocol.constraint import Constraint
from outrider.protocol.errors import InvalidRequest

MAX_CACHED = 64
MAX_CACHED_BYTES = 2 << 20
"""Most bytes of the cached constraints' texts."""
STACK_BYTES = 64 << 20
"""Stack of the compiling thread, in bytes. The library recurses along the grammar, and orchestrators have
checked that a stack of 8 MiB suffices."""
NO_VOCABULARY = "the model came without a tokenizer that constraints can be enforced with; leave it out"

_T = TypeVar("_T")


class GrammarCache:
    """Compiled grammars by the digest of their constraint; the least recently used one is dropped."""

    def __init__(self, max_entries: int = MAX_CACHED, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes) -> LLMatcher | None:
        """A matcher at the beginning of the text, for the caller to copy; None if there is none."""
        found = self._kept.get(digest)
        if found is None:
            return None
        self._kept.move_to_end(digest)
        return found[0]

    def keep(self, digest: bytes, matcher: LLMatcher, size: int) -> None:
        """Keep a matcher whose constraint has `size` bytes."""
        self.forget(digest)
        self._kept[digest] = matcher, size
        self.bytes += size
        while len(self._kept) > self._max_entries or self.bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def forget(self, digest: bytes) -> None:
        """Drop the matcher of a digest, if there is one."""
        _, size = self._kept.pop(digest, (None, 0))
        self.bytes -= size


async def matcher_of(
    compiler: GrammarCompiler | None, constraint: Constraint | None, generated: Sequence[int]
) -> Matcher | None:
    """The matcher of a session after its `generated` tokens; None without a constraint.

    Raises:
        InvalidRequest: see `GrammarCompiler.matcher`; or there is a constraint and no compiler.
    """
    if constraint is None:
        return None
    if compiler is None:
        raise InvalidRequest(constraint.field, NO_VOCABULARY)
    return await compiler.matcher(constraint, generated)


class GrammarCompiler:
    """Makes the matchers of one replica's sessions; its methods are called from the event loop."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._cache = GrammarCache()
        """Used on the worker's thread only, so that the next job finds what this one compiles."""
        self._worker = _Worker()

    @classmethod
    def load(cls, tokenizer_json: bytes | None, eos_token_ids: Sequence[int]) -> GrammarCompiler | None:
        """Return the compiler for a tokenizer; None where there is none, or one without constraints."""
        vocabulary = load_vocabulary(tokenizer_json, eos_token_ids)
        return None if vocabulary is None else cls(vocabulary)

    async def matcher(self, constraint: Constraint, generated: Sequence[int]) -> Matcher:
        """A matcher after the tokens that have been generated, with the next mask ready.

        Raises:
            InvalidRequest: the constraint is wrong or too costly, the tokens do not follow it, or nothing
                may follow them.
        """
        return await self._worker.do(lambda: self._matcher(constraint, generated))

    def forget(self, constraint: Constraint) -> None:
        """Drop a grammar whose memory is used up, so that the next request compiles it again."""
        self._worker.post(lambda: self._cache.forget(constraint.digest))

    def _matcher(self, constraint: Constraint, generated: Sequence[int]) -> Matcher:
        digest = constraint.digest
        base = self._cache.find(digest)
        if base is None:
            base = compiled(constraint, self._vocabulary)
            self._cache.keep(digest, base, constraint.size)
        try:
            return _begun(base, constraint, generated)
        except InvalidRequest:
            self._cache.forget(digest)
            raise


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
    """A thread with a large stack, started when it is first needed; it ends with the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = False

    async def do(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the thread and return or raise its outcome."""
        done: Future[_T] = Future()

        def job() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # any error goes to the waiter
                    done.set_exception(error)

        self.post(job)
        return await asyncio.wrap_future(done)

    def post(self, job: Callable[[], None]) -> None:
        """Run a job in the thread, after those before it."""
        if not self._started:
            self._start()
        self._jobs.put(job)

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
