"""The shell of an engine around a core that only notes what it is told: order, bounds, waking, ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from outrider.protocol.errors import InternalError, InvalidRequest, Overloaded, StaleHandle, Unavailable
from outrider.rpc import engine_shell
from outrider.rpc.engine_shell import EngineShell, Looks
from outrider.rpc.queues import Deliver, Inbox, Outbox, Stream

MAX_MESSAGES = 8
MAX_UNREAD = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """Open a stream; the core answers with its number."""

    stream: Stream[int]


@dataclass(frozen=True, slots=True)
class Count:
    """Announce so many numbers, in one batch."""

    stream: Stream[int]
    numbers: range


@dataclass(frozen=True, slots=True)
class Question:
    """To be answered with the same."""

    answer: object
    reply: Outbox[object]


@dataclass(frozen=True, slots=True)
class Break:
    """The core fails at this."""


@dataclass(frozen=True, slots=True)
class Bye:
    """Close a stream."""

    stream: Stream[int]


Message = Hello | Count | Question | Break | Bye


class NotingCore:
    """Does what the messages say and sleeps; `held` keeps it in the middle of a turn."""

    def __init__(self, deliver: Deliver) -> None:
        self.turns = 0
        self.absorbed: list[Message] = []
        self.taken: list[list[Message]] = []
        """By turn."""
        self.held = threading.Event()
        self.held.set()
        self.in_turn = threading.Event()
        self._deliver = deliver

    def turn(self, messages: list[Message]) -> float | None:
        """Note the messages and answer them."""
        self.turns += 1
        self.taken.append([*messages])
        if not self.held.is_set():
            self.in_turn.set()
            self.held.wait(10)
        for message in messages:
            self._absorb(message)
        return None

    def _absorb(self, message: Message) -> None:
        self.absorbed.append(message)
        match message:
            case Hello(stream):
                self._deliver([stream.outbox.announce(stream.id)])
            case Count(stream, numbers):
                self._deliver([stream.outbox.announce(number) for number in numbers])
            case Question(answer, reply):
                self._deliver([reply.announce(answer)])
            case Break():
                raise RuntimeError("out of order")
            case Bye():
                pass


class Shell(EngineShell[NotingCore, Message]):
    """A shell with a way in for the test."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        super().__init__(
            NotingCore,
            max_messages=MAX_MESSAGES,
            max_unread=MAX_UNREAD,
            on_failure=lambda: self.failures.append("failed"),
        )

    def open(self) -> Stream[int]:
        """A new stream."""
        return self._open_stream(Hello)

    def close(self, stream: Stream[int]) -> None:
        """The end of one."""
        self._close_stream(stream, Bye(stream))

    def post(self, message: Message) -> None:
        """Any message."""
        self._post(message)

    async def ask(self, answer: object) -> object:
        """A unary call."""
        return await self._ask(lambda reply: Question(answer, reply))

    async def hold(self) -> None:
        """Return once the core stands in a turn that has taken what came before."""
        self.core.in_turn.clear()
        self.core.held.clear()
        self._inbox.wake()
        await asyncio.to_thread(self.core.in_turn.wait, 10)


@asynccontextmanager
async def running() -> AsyncIterator[Shell]:
    """A shell whose thread runs."""
    shell = Shell()
    shell.start()
    try:
        async with asyncio.timeout(30):
            yield shell
    finally:
        shell.core.held.set()
        await shell.stop()


async def test_messages_arrive_in_order_and_so_do_events() -> None:
    """Whatever was posted while the core worked is taken in one turn."""
    async with running() as shell:
        stream = shell.open()
        assert await stream.outbox.take() == stream.id
        await shell.hold()
        posted = [Count(stream, range(3)), Count(stream, range(3, 5))]
        for message in posted:
            shell.post(message)
        shell.core.held.set()
        assert [await stream.outbox.take() for _ in range(5)] == list(range(5))
        assert shell.core.absorbed == [Hello(stream), *posted]
        assert posted in shell.core.taken


async def test_a_full_inbox_refuses_all_but_closings() -> None:
    """Nobody fills the memory of a core that does not come round; there is room again when it has."""
    async with running() as shell:
        stream = shell.open()
        await stream.outbox.take()
        await shell.hold()
        for _ in range(MAX_MESSAGES):
            shell.post(Count(stream, range(0)))
        with pytest.raises(Overloaded, match="8 messages wait for the engine"):
            shell.post(Count(stream, range(0)))
        with pytest.raises(Overloaded):
            shell.open()
        with pytest.raises(Overloaded):
            await shell.ask(1)
        shell.close(stream)
        assert shell.sessions == 0
        shell.core.held.set()
        await until(lambda: Bye(stream) in shell.core.absorbed)
        assert await shell.ask(2) == 2


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    while not condition():  # noqa: ASYNC110 - it has no event here
        await asyncio.sleep(0.001)


async def test_calls_are_answered_with_a_result_or_an_error() -> None:
    """And a caller who has gone disturbs nobody."""
    async with running() as shell:
        assert await shell.ask("yes") == "yes"
        with pytest.raises(StaleHandle):
            await shell.ask(StaleHandle("gone"))
        await shell.hold()
        gone = asyncio.create_task(shell.ask("late"))
        await asyncio.sleep(0)
        gone.cancel()
        shell.core.held.set()
        assert await shell.ask("next") == "next"


async def test_calls_that_wait_are_bounded() -> None:
    """Further ones are refused."""
    async with running() as shell:
        await shell.hold()
        with patch.object(engine_shell, "MAX_REPLIES", 2):
            calls = [asyncio.create_task(shell.ask(number)) for number in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 calls wait"):
                await shell.ask(2)
            shell.core.held.set()
            assert await asyncio.gather(*calls) == [0, 1]


async def test_a_failure_tells_every_session_and_call() -> None:
    """Those that the core knows, and those behind the message that it failed at."""
    async with running() as shell:
        known = shell.open()
        await known.outbox.take()
        await shell.hold()
        shell.post(Break())
        behind = shell.open()
        call = asyncio.create_task(shell.ask("anybody?"))
        await asyncio.sleep(0)
        with capture_logs() as logs:
            shell.core.held.set()
            for waiting in (known.outbox.take(), behind.outbox.take(), call):
                with pytest.raises(InternalError, match="its log has the details"):
                    await waiting
        assert (logs[0]["event"], logs[0]["problem"]) == ("the engine failed", "out of order")
        assert isinstance(shell.failure, InternalError)
        assert shell.failures == ["failed"]
        with pytest.raises(InternalError):
            shell.open()
        for stream in (known, behind):
            shell.close(stream)
        assert shell.sessions == 0


async def test_a_failure_passes_by_readers_who_take_nothing() -> None:
    """One who has left unread all that a last step may say, and whose own message was wrong, holds up neither
    the others' errors nor the end of the process."""
    async with running() as shell:
        slow, other = shell.open(), shell.open()
        await other.outbox.take()
        shell.post(Count(slow, range(MAX_UNREAD - 2)))  # one more is its opening: there is room for a step
        shell.post(Count(slow, range(4)))  # log probabilities and features of a prompt, a verdict, an error
        await shell.ask("round")
        slow.outbox.end(InvalidRequest("propose", "is wrong"))
        shell.post(Break())
        with capture_logs(), pytest.raises(InternalError):
            await other.outbox.take()
        await until(lambda: shell.failures == ["failed"])


async def test_it_can_be_made_to_fail_from_outside() -> None:
    """An idle engine that another thread says is broken tells every session, and refuses the next."""
    async with running() as shell:
        stream = shell.open()
        await stream.outbox.take()
        error = Unavailable("a part of the model is gone")
        with capture_logs() as logs:
            await asyncio.to_thread(shell.fail, error)
            with pytest.raises(InternalError, match="its log has the details"):
                await stream.outbox.take()
        assert [line["event"] for line in logs] == ["the engine failed"]
        assert shell.failure is not None
        with pytest.raises(InternalError):
            shell.open()


async def test_what_was_announced_before_a_failure_is_read_first() -> None:
    """The error comes behind it."""
    async with running() as shell:
        stream = shell.open()
        await stream.outbox.take()
        await shell.hold()
        for message in (Count(stream, range(2)), Break()):
            shell.post(message)
        with capture_logs():
            shell.core.held.set()
            await until(lambda: shell.failure is not None)
        assert [await stream.outbox.take() for _ in range(2)] == [0, 1]
        with pytest.raises(InternalError):
            await stream.outbox.take()


async def test_stopping_ends_the_turn_in_progress_and_no_other() -> None:
    """Open sessions hear that the replica shuts down; that is no failure."""
    async with running() as shell:
        stream = shell.open()
        await stream.outbox.take()
        await shell.hold()
        shell.post(Count(stream, range(1)))
        turns = shell.core.turns
        stopping = asyncio.create_task(shell.stop())
        await asyncio.sleep(0)
        shell.core.held.set()
        await stopping
        assert shell.core.turns == turns
        with pytest.raises(Unavailable, match="shutting down"):
            await stream.outbox.take()
        with pytest.raises(Unavailable):
            shell.open()
        assert shell.failure is None
        assert shell.failures == []


async def test_a_turn_that_does_not_end_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell that a GPU hangs: health is good, and sessions wait."""
    ended = asyncio.Event()
    monkeypatch.setattr(engine_shell, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(engine_shell, "end_at_once", ended.set)
    with capture_logs() as logs:
        async with running() as shell:
            await shell.hold()
            await ended.wait()
    assert [line["log_level"] for line in logs] == ["error"]


def test_only_one_turn_that_goes_on_is_stuck() -> None:
    """An engine that waits, or is at another turn, goes on; looks at the turn before do not count."""
    looks, long = Looks(), [7] * engine_shell.STUCK_LOOKS
    assert not any(map(looks.find_stuck, [0] * 500 + list(range(1, 500))))
    assert not any(map(looks.find_stuck, [*long, 0, *long, 8]))
    assert [looks.find_stuck(turn) for turn in [*long, 7]] == [False] * len(long) + [True]


async def test_the_core_is_woken_when_a_full_outbox_has_room() -> None:
    """At the first event that is taken from a full one, and not by those from others."""
    async with running() as shell:
        stream = shell.open()
        await stream.outbox.take()
        shell.post(Count(stream, range(MAX_UNREAD)))
        await until(lambda: stream.outbox.full)
        turns = shell.core.turns
        await stream.outbox.take()
        await until(lambda: shell.core.turns == turns + 1)
        await stream.outbox.take()
        await shell.ask("round")
        assert shell.core.turns == turns + 2


async def test_a_wake_that_comes_between_two_counts_is_not_lost() -> None:
    """The engine fills the outbox while the reader takes an event: having seen it full, it is woken."""

    class Racing(Outbox[int]):
        """Announces another event in the moment in which one is taken out of the queue."""

        def __init__(self) -> None:
            super().__init__(MAX_UNREAD, lambda: woken.append(self.full))
            get = self._events.get

            async def get_late() -> int | BaseException:
                event = await get()
                if not self.full:
                    seen.append((self.announce(9), self.full)[1])
                return event

            self._events.get = get_late  # type: ignore[method-assign]

    woken: list[bool] = []
    seen: list[bool] = []
    outbox = Racing()
    put, number = outbox.announce(1)
    put(number)
    assert await outbox.take() == 1
    assert (seen, woken) == ([True], [False])


def test_an_inbox_sleeps_no_longer_than_it_was_told() -> None:
    """No wait returns at once; a bounded one when its time is up; a wake before it is kept."""
    inbox: Inbox[int] = Inbox()
    assert inbox.take(0.0) == []
    assert inbox.take(0.001) == []
    inbox.wake()
    assert inbox.take(None) == []
    inbox.put(1)
    inbox.put(2)
    assert len(inbox) == 2
    assert inbox.take(None) == [1, 2]
