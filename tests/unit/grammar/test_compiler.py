"""Matchers for sessions: compiled once, aside, and after what is generated already."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from outrider.grammar import compiler as module
from outrider.grammar.compiler import GrammarCache, GrammarCompiler, matcher_of
from outrider.protocol.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from tests.grammars import EOS, choice, ids, matcher, regex, vocabulary


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Constraint, str]]:
    """What is compiled, and on which thread."""
    seen: list[tuple[Constraint, str]] = []

    def compiled(constraint: Constraint, words: Any) -> Any:
        seen.append((constraint, threading.current_thread().name))
        return original(constraint, words)

    original = module.compiled
    monkeypatch.setattr(module, "compiled", compiled)
    return seen


async def test_a_constraint_is_compiled_once_and_on_another_thread(
    counted: list[tuple[Constraint, str]],
) -> None:
    """Sessions get matchers of their own, ready for the first step."""
    grammars = GrammarCompiler(vocabulary())
    first = await grammars.matcher(choice("yes", "no"), ())
    second = await grammars.matcher(choice("yes", "no"), ())
    first.advance(ids("yes")[0])
    assert second.mask(()) == matcher(choice("yes", "no")).mask(())
    assert counted == [(choice("yes", "no"), "grammars")]


async def test_sessions_that_come_at_once_share_a_constraint(counted: list[tuple[Constraint, str]]) -> None:
    """It is compiled for the first of them only, as for the continuations of one request."""
    grammars = GrammarCompiler(vocabulary())
    await asyncio.gather(*(grammars.matcher(choice("yes", "no"), ()) for _ in range(16)))
    assert len(counted) == 1


async def test_what_is_spoilt_is_compiled_anew(counted: list[tuple[Constraint, str]]) -> None:
    """After `forget`, when its memory is used up."""
    grammars = GrammarCompiler(vocabulary())
    await grammars.matcher(choice("yes"), ())
    grammars.forget(choice("yes"))
    grammars.forget(choice("never seen"))
    await grammars.matcher(choice("yes"), ())
    assert len(counted) == 2


async def test_a_session_goes_on_where_another_was() -> None:
    """With the masks that the tokens generated so far lead to."""
    constraint, text = regex("[a-z]+-[0-9]{4}"), ids("abc-12")
    found = await GrammarCompiler(vocabulary()).matcher(constraint, text)
    assert found.mask(()) == matcher(constraint, text).mask(())


@pytest.mark.parametrize(
    ("generated", "said"),
    [
        ([*ids("ye"), 5], r"generated token \d does not follow sampling.choice"),
        (ids("yes"), "are all that sampling.choice allows"),
        ([*ids("yes"), EOS], "does not follow"),
    ],
)
async def test_tokens_that_do_not_lead_on_are_refused(generated: list[int], said: str) -> None:
    """They are not of this constraint, or nothing follows them."""
    with pytest.raises(InvalidRequest, match=said):
        await GrammarCompiler(vocabulary()).matcher(choice("yes"), generated)


async def test_a_wrong_constraint_is_not_kept() -> None:
    """It is refused each time, and takes no place."""
    grammars = GrammarCompiler(vocabulary())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await grammars.matcher(regex("("), ())
    assert len(grammars._cache) == 0


async def test_without_a_vocabulary_constraints_are_refused() -> None:
    """In a sentence that names the field; nothing is said where there is no constraint."""
    assert await matcher_of(None, None, ()) is None
    with pytest.raises(InvalidRequest, match=r"sampling\.choice: the model came without a tokenizer"):
        await matcher_of(None, choice("a"), ())


async def test_a_caller_that_goes_leaves_the_thread_at_work() -> None:
    """Its job is dropped, and the next is done."""
    grammars = GrammarCompiler(vocabulary())
    gone = asyncio.create_task(grammars.matcher(choice("a"), ()))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await grammars.matcher(choice("b"), ())).settle() == ""
    with pytest.raises(asyncio.CancelledError):
        await gone


def test_the_cache_is_bounded_in_number_and_bytes() -> None:
    """The least recently used goes first."""
    cache, kept = GrammarCache(max_entries=3, max_bytes=100), matcher(choice("x"))._root
    for name in (b"a", b"b", b"c"):
        cache.keep(name, kept, 10)
    assert cache.find(b"a") is kept
    cache.keep(b"d", kept, 10)
    assert (cache.find(b"b"), len(cache), cache.bytes) == (None, 3, 30)
    cache.keep(b"e", kept, 85)
    assert (cache.find(b"a"), cache.find(b"d"), len(cache), cache.bytes) == (None, kept, 2, 95)
    cache.keep(b"e", kept, 20)
    assert cache.bytes == 30
    cache.keep(b"larger than all", kept, 200)
    assert (len(cache), cache.bytes) == (0, 0)
