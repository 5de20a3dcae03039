"""Keys and values go from one engine to another, whole or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from outrider.engine.kv.page_memory import PageMemory
from outrider.protocol.errors import (
    DeadlineExceeded,
    Flood,
    InvalidRequest,
    OutOfPages,
    OutriderError,
    StaleHandle,
)
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens
from outrider.protocol.messages import KvHandle, Opened, OpenVerify, SamplingParams, Verdict
from outrider.telemetry.instruments import VerifyInstruments
from tests.unit.verify_service.fakes import (
    LIMITS,
    STEP_SECONDS,
    VOCABULARY,
    FakeRunner,
    greedy_text,
    opening,
    text,
)
from verify_service.core import CoreSettings, VerifyCore
from verify_service.engine import VerifyEngine
from verify_service.mailbox import Closed
from verify_service.speculation.cost_model import CostModel
from verify_service.transfer import exchange as module
from verify_service.transfer.exchange import KvExchange

PAGE = 4
PROMPT = tuple(index % VOCABULARY for index in range(30))
LAYOUT = KvLayout("weights", "exact", "float32", PAGE, "2x4x1x3")


@dataclass
class Side:
    """An engine with pages that have bytes."""

    engine: VerifyEngine
    runner: FakeRunner
    store: torch.Tensor
    exchange: KvExchange

    def bytes_of(self, pages: Sequence[int]) -> list[bytes]:
        """The contents of pages."""
        memory = PageMemory([self.store], PAGE)
        return [memory.read(page, PAGE) for page in pages]

    async def settled(self) -> None:
        """Every page is back."""
        async with asyncio.timeout(10):
            while self.engine.statistics.used or self.engine.moving:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.001)


@asynccontextmanager
async def side(name: str, pages: int = 64, seconds: float = STEP_SECONDS) -> AsyncIterator[Side]:
    """A running engine whose memory has random contents."""
    runner = FakeRunner(pages, PAGE)
    settings = CoreSettings(name, f"life of {name}", LIMITS, 64, 60.0, False)
    cost = CostModel([1, 64], [seconds, seconds], 64)
    instruments = VerifyInstruments(CollectorRegistry())
    engine = VerifyEngine(
        lambda deliver: VerifyCore(runner, cost, settings, instruments, deliver),
        max_sessions=4,
        max_unread=100,
    )
    store = torch.randn((2, pages * PAGE, 1, 3))
    exchange = KvExchange(engine, PageMemory([store], PAGE), LAYOUT, VOCABULARY, 200, 30.0)
    engine.start()
    try:
        yield Side(engine, runner, store, exchange)
    finally:
        await engine.stop()


async def run_session(engine: VerifyEngine, request: OpenVerify, keep: bool) -> tuple[Opened, list[int], Any]:
    """A whole session: how it opened, what it said, what it left."""
    stream = await engine.open(request)
    opened = await stream.outbox.take()
    verdicts = []
    while not verdicts or verdicts[-1].finish_reason == 0:
        verdicts.append(await stream.outbox.take())
        assert isinstance(verdicts[-1], Verdict)
    engine.finish(stream, keep, move=keep)
    closed = await stream.outbox.take()
    engine.close(stream)
    assert isinstance(closed, Closed)
    return opened, text(verdicts), closed.handle


async def kept(owner: Side, new_tokens: int = 8) -> tuple[KvHandle, tuple[int, ...]]:
    """A handle of a session that generated some tokens, and all tokens that it covers."""
    sampling = SamplingParams(max_tokens=new_tokens)
    _, said, handle = await run_session(owner.engine, opening(PROMPT, sampling=sampling), keep=True)
    covered = (*PROMPT, *said)[: handle.length]
    assert handle.length == len(PROMPT) + new_tokens - 1
    return handle, covered


async def parts_of(owner: Side, handle: KvHandle, tokens: Sequence[int]) -> list[KvPart]:
    """All parts of a transfer, in memory."""
    parts: list[KvPart] = [KvTokens(tuple(tokens))]

    async def write(part: KvPart) -> None:
        parts.append(part)

    await owner.exchange.send(handle, write)
    return parts


async def stream_of(parts: Sequence[KvPart], then: Callable[[], Any] | None = None) -> AsyncIterator[KvPart]:
    """The parts one by one; then what `then` does, or the end."""
    for part in parts:
        yield part
    if then is not None:
        await then()


@asynccontextmanager
async def owner_and_other(**receiver: Any) -> AsyncIterator[tuple[Side, Side]]:
    """An owner and a receiver; neither holds anything afterwards."""
    async with asyncio.timeout(30), side("a") as owner, side("b", **receiver) as other:
        yield owner, other
        await owner.settled()


async def test_a_session_goes_on_elsewhere_without_prefill() -> None:
    """Nothing but the last token is computed there, and the text is what it would have been."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        moved = await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        assert (moved.owner, moved.length, moved.digest) == ("b", handle.length, handle.digest)
        truth = greedy_text(PROMPT, 20)
        request = opening(
            (*PROMPT, *truth[:8]),
            kv_handle=moved,
            all_token_ids=True,
            prompt_length=len(PROMPT),
            sampling=SamplingParams(max_tokens=20),
            first_step=8,
        )
        opened, said, _ = await run_session(other.engine, request, keep=False)
        assert opened.cached_length == handle.length
        assert said == truth[8:]
        assert sum(map(sum, other.runner.steps)) == len(said)
        await other.settled()


async def test_every_byte_arrives_in_its_place() -> None:
    """The pages of the receiver equal those of the owner, though their numbers differ."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        theirs = next(owner.engine.core.handles.sequences()).pages
        expected = owner.bytes_of(theirs)
        other.engine.core.handles.pool.allocate(3)
        moved = await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        mine = next(other.engine.core.handles.sequences()).pages
        assert mine != theirs
        whole = handle.length // PAGE
        assert other.bytes_of(mine)[:whole] == expected[:whole]
        await other.engine.release(moved)


async def test_what_came_from_elsewhere_is_used_for_its_own_session_alone() -> None:
    """Its pages are never found by their tokens, nor are those that the session adds or a copy of it has."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        moved = await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        copy = await other.engine.fork(moved)
        request = opening(
            (*tokens, 1), kv_handle=moved, all_token_ids=True, sampling=SamplingParams(max_tokens=20)
        )
        await run_session(other.engine, request, keep=False)
        await other.engine.release(copy)
        pool = other.engine.core.handles.pool
        assert pool.cached_prefix(tokens) == ([], b"")
        assert pool.statistics().cached == 0


async def test_a_handle_is_spent_by_sending_it() -> None:
    """Nobody gets the same keys and values twice, and the owner's pages are free afterwards."""
    async with owner_and_other() as (owner, _):
        handle, tokens = await kept(owner)
        assert owner.engine.statistics.used > 0
        await parts_of(owner, handle, tokens)
        await owner.settled()
        with pytest.raises(StaleHandle):
            await parts_of(owner, handle, tokens)


@pytest.mark.parametrize("field", ["weights", "arithmetic", "dtype", "page_size", "shape"])
async def test_another_layout_is_refused(field: str) -> None:
    """By the name of what differs; nothing is kept."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        assert parts[1] == LAYOUT
        parts[1] = replace(LAYOUT, **{field: 8 if field == "page_size" else "else"})
        with pytest.raises(InvalidRequest, match="is not that of this replica") as caught:
            await other.exchange.receive(stream_of(parts))
        assert caught.value.field == f"layout.{field}"
        await other.settled()


def flipped(pages: KvPages) -> KvPages:
    """One bit of the last page is wrong."""
    *others, last = pages.contents
    return replace(pages, contents=(*others, bytes([last[0] ^ 1]) + last[1:]))


def shortened(pages: KvPages) -> KvPages:
    """The first page is one byte short."""
    return replace(pages, contents=(pages.contents[0][:-1], *pages.contents[1:]))


def swapped(pages: KvPages) -> KvPages:
    """Two sound pages are in each other's place, with their digests."""
    first, second, *rest = zip(pages.contents, pages.digests, strict=True)
    contents, digests = zip(second, first, *rest, strict=True)
    return replace(pages, contents=contents, digests=digests)


LIES: dict[str, tuple[Callable[[list[KvPart]], list[KvPart]], type[OutriderError]]] = {
    "a wrong bit": (lambda parts: [*parts[:2], flipped(parts[2])], InvalidRequest),
    "a short page": (lambda parts: [*parts[:2], shortened(parts[2])], InvalidRequest),
    "pages in the wrong order": (lambda parts: [*parts[:2], swapped(parts[2])], InvalidRequest),
    "other tokens": (
        lambda parts: [KvTokens((*parts[0].token_ids[1:], 1)), *parts[1:]],
        InvalidRequest,
    ),
    "a page again": (lambda parts: [*parts, parts[2]], InvalidRequest),
    "more pages": (
        lambda parts: [*parts, replace(parts[2], first=len(parts[2].contents))],
        Flood,
    ),
    "no pages in a part": (lambda parts: [*parts[:2], KvPages(0, (), ())], InvalidRequest),
    "an early end": (lambda parts: parts[:2], InvalidRequest),
    "no layout": (lambda parts: [parts[0], parts[2]], InvalidRequest),
    "a second layout": (lambda parts: [*parts[:2], parts[1]], InvalidRequest),
    "no tokens": (lambda parts: parts[1:], InvalidRequest),
    "nothing": (lambda parts: [], InvalidRequest),
    "tokens that are none": (lambda parts: [KvTokens((VOCABULARY,)), *parts[1:]], InvalidRequest),
    "too many tokens": (lambda parts: [KvTokens((1,) * 200), *parts[1:]], InvalidRequest),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_owner_is_refused(lie: str) -> None:
    """Whatever is wrong with what comes, it ends in an error, and the pages are back."""
    change, kind = LIES[lie]
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        assert len(parts) == 3, "one part has room for all pages"
        with pytest.raises(kind):
            await other.exchange.receive(stream_of(change(parts)))
        await other.settled()


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_silent_owner_is_not_waited_for(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its tokens, its layout or its pages: a transfer may take as long as computing would, no
    longer."""
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(module, "MIN_SECONDS", 0.05)
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        with pytest.raises(DeadlineExceeded):
            await other.exchange.receive(stream_of(parts[:after], asyncio.Event().wait))
        await other.settled()


async def test_a_slow_engine_is_given_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the estimate of computing the tokens, by the step times that the replica measured."""
    monkeypatch.setattr(module, "MIN_SECONDS", 0.0)
    async with owner_and_other(seconds=1000.0) as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        await other.engine.release(await other.exchange.receive(stream_of(parts)))


async def test_a_full_pool_refuses() -> None:
    """A sequence that does not fit at all costs no kept one its place."""
    async with owner_and_other(pages=8) as (owner, other):
        small = opening((1, 2, 3), sampling=SamplingParams(max_tokens=2))
        _, _, before = await run_session(other.engine, small, keep=True)
        handle, tokens = await kept(owner)
        with pytest.raises(OutOfPages):
            await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        await other.engine.release(before)


async def test_kept_sequences_make_room() -> None:
    """What no session needs is given up for a session that moves."""
    async with owner_and_other(pages=11) as (owner, other):
        small = opening((1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=4))
        _, _, before = await run_session(other.engine, small, keep=True)
        handle, tokens = await kept(owner)
        moved = await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        with pytest.raises(StaleHandle):
            await other.engine.release(before)
        await other.engine.release(moved)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (3 * 96, 3)])
async def test_large_sequences_come_in_several_parts(
    size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has some pages, in order; one is never too small for a page."""
    monkeypatch.setattr(module, "PART_BYTES", size)
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        assert max(len(part.contents) for part in parts[2:]) == most
        assert sum(len(part.contents) for part in parts[2:]) == -(-handle.length // PAGE)
        await other.engine.release(await other.exchange.receive(stream_of(parts)))


async def test_a_receiver_that_is_cancelled_holds_nothing() -> None:
    """The caller has gone in the middle."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        parts = await parts_of(owner, handle, tokens)
        waiting = asyncio.Event()
        receiving = asyncio.create_task(other.exchange.receive(stream_of(parts[:2], waiting.wait)))
        async with asyncio.timeout(10):
            while not other.engine.moving:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.001)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await other.settled()


async def test_an_owner_whose_reader_has_gone_holds_nothing() -> None:
    """The keys and values are lost to the session, which computes them again."""
    async with owner_and_other() as (owner, _):
        handle, _ = await kept(owner)

        async def write(part: KvPart) -> None:
            raise ConnectionError("the reader has gone")

        with pytest.raises(ConnectionError):
            await owner.exchange.send(handle, write)


async def test_a_handle_must_cover_the_tokens_it_is_given_with() -> None:
    """An opening with other tokens than the keys and values are of is refused."""
    async with owner_and_other() as (owner, other):
        handle, tokens = await kept(owner)
        moved = await other.exchange.receive(stream_of(await parts_of(owner, handle, tokens)))
        wrong = (*tokens[:-1], (tokens[-1] + 1) % VOCABULARY, 1)
        stream = await other.engine.open(opening(wrong, kv_handle=moved, all_token_ids=True))
        with pytest.raises(StaleHandle, match="does not cover"):
            await stream.outbox.take()
        other.engine.close(stream)
        await other.engine.release(moved)


async def test_a_thread_is_waited_for_however_often_its_transfer_is_cancelled() -> None:
    """The pages that it still writes must not be given to another sequence."""
    may_end, begun = threading.Event(), asyncio.Event()
    loop, ended = asyncio.get_running_loop(), []

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(10)
        ended.append(True)

    transfer = asyncio.ensure_future(module._finished(work))
    await begun.wait()
    for _ in range(3):
        transfer.cancel()
        await asyncio.wait({transfer}, timeout=0.0)
    assert not transfer.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    assert ended
