"""Bodies of requests: what is held of them in memory has a bound."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming import bodies as incoming
from orchestrator.gateway.incoming.bodies import INLINE_BYTES, MAX_HELD, Bodies
from outrider.protocol.errors import Unavailable
from tests.unit.orchestrator.rig import no_more_files, runs, until

HEADERS = {b"content-type": b"application/json"}
LARGE = 2 * INLINE_BYTES


class Caller:
    """Sends what it is given, part by part."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def send(self, part: bytes, more: bool = True) -> None:
        """A part of its body."""
        self.parts.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def taken(self) -> None:
        """All that was sent has been read."""
        while not self.parts.empty():  # noqa: ASYNC110 - no one event says it
            await asyncio.sleep(0)


async def test_bodies_that_still_come_take_memory_too() -> None:
    """Beyond the bound a large one is refused and a small one is not; one that has left makes room."""
    bodies, callers = Bodies(LARGE), [Caller() for _ in range(MAX_HELD)]
    reading = [asyncio.ensure_future(bodies.read(HEADERS, one.parts.get, len)) for one in callers]
    for caller in callers:
        caller.send(b" " * LARGE)
        await caller.taken()
    further = Caller()
    further.send(b" " * LARGE)
    with pytest.raises(Unavailable, match="try again"):
        await bodies.read(HEADERS, further.parts.get, len)
    further.send(b'"ab"', more=False)
    assert await bodies.read(HEADERS, further.parts.get, len) == 2
    reading[0].cancel()
    await asyncio.wait(reading[:1])
    further.send(b" " * LARGE)
    room = asyncio.ensure_future(bodies.read(HEADERS, further.parts.get, len))
    await further.taken()
    assert not room.done()
    for task in (room, *reading):
        task.cancel()
    await asyncio.wait({room, *reading})


def test_many_large_bodies_are_read_one_after_another() -> None:
    """More than the largest ones that would fit, when they are smaller: none is refused."""

    async def scenario() -> list[int]:
        bodies, callers = Bodies(64 * LARGE), [Caller() for _ in range(2 * MAX_HELD)]
        for caller in callers:
            caller.send(b'"' + b"x" * LARGE + b'"', more=False)
        try:
            return await asyncio.gather(*(bodies.read(HEADERS, one.parts.get, len) for one in callers))
        finally:
            bodies.close()

    assert asyncio.run(scenario()) == [LARGE] * 2 * MAX_HELD


@pytest.mark.parametrize("size", [0, LARGE])
async def test_a_body_that_is_nested_too_deeply_for_its_reader_is_refused(size: int) -> None:
    """JSON's own parser goes deeper than what shows or writes a value again."""
    bodies, caller = Bodies(2 * LARGE), Caller()
    caller.send(b"{}" + b" " * size, more=False)
    try:
        with pytest.raises(Problem, match="nested too deeply"):
            await bodies.read(HEADERS, caller.parts.get, too_deep)
    finally:
        bodies.close()


def too_deep(value: Any) -> None:
    """A reader for which every value is too deep."""
    raise RecursionError


def pid(value: Any) -> int:
    """The process that parses."""
    return os.getpid()


def test_the_process_that_parses_ends_with_its_gateway() -> None:
    """However the gateway ends."""
    program = (
        "import asyncio, os, signal\n"
        "from tests.unit.orchestrator.gateway.test_bodies import HEADERS, LARGE, Bodies, Caller, pid\n"
        "async def main():\n"
        "    caller = Caller()\n"
        "    caller.send(b'1' + b' ' * LARGE, more=False)\n"
        "    print(await Bodies(2 * LARGE).read(HEADERS, caller.parts.get, pid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    helper = int(done.stdout)
    asyncio.run(until(lambda: not runs(helper)))


def test_a_process_that_has_ended_is_replaced() -> None:
    """The next request is not refused for it."""

    async def scenario() -> tuple[int, int]:
        bodies, caller = Bodies(2 * LARGE), Caller()
        try:
            caller.send(b"1" + b" " * LARGE, more=False)
            first = await bodies.read(HEADERS, caller.parts.get, pid)
            os.kill(first, signal.SIGKILL)
            await until(lambda: not runs(first))
            caller.send(b"1" + b" " * LARGE, more=False)
            return first, await bodies.read(HEADERS, caller.parts.get, pid)
        finally:
            bodies.close()

    first, second = asyncio.run(scenario())
    assert second != first


def test_a_process_that_is_stopped_is_ended_too() -> None:
    """A gateway would otherwise wait for it at its end. Other processes of the program go on."""

    async def read(bodies: Bodies) -> int:
        caller = Caller()
        caller.send(b"1" + b" " * LARGE, more=False)
        return await bodies.read(HEADERS, caller.parts.get, pid)

    async def scenario() -> None:
        bodies, others = Bodies(2 * LARGE), Bodies(2 * LARGE)
        other, helper = await read(others), await read(bodies)
        os.kill(helper, signal.SIGSTOP)
        bodies.close()
        await until(lambda: not runs(helper))
        assert runs(other)
        assert await read(others) == other
        others.close()

    asyncio.run(scenario())


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large requests do not wait for ever for one that is stopped."""

    async def read(bodies: Bodies) -> int:
        caller = Caller()
        caller.send(b"1" + b" " * LARGE, more=False)
        return await bodies.read(HEADERS, caller.parts.get, pid)

    async def scenario() -> None:
        bodies = Bodies(2 * LARGE)
        try:
            helper = await read(bodies)
            os.kill(helper, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(incoming, "ANSWER_SECONDS", 0.01)
                with pytest.raises(Unavailable, match="try again"):
                    await read(bodies)
            await until(lambda: not runs(helper))
            assert await read(bodies) != helper
        finally:
            bodies.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("spare", [0, 7])
async def test_without_room_for_a_process_large_bodies_are_refused(spare: int) -> None:
    """For want of file descriptors, at the first and at a later step of its start. The next body is
    read once there is room."""
    bodies, caller = Bodies(2 * LARGE), Caller()
    caller.send(b"1" + b" " * LARGE, more=False)
    with no_more_files(spare), pytest.raises(Unavailable, match="Too many open files"):
        await bodies.read(HEADERS, caller.parts.get, pid)
    try:
        caller.send(b"1" + b" " * LARGE, more=False)
        assert runs(await bodies.read(HEADERS, caller.parts.get, pid))
    finally:
        bodies.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
async def test_a_full_or_locked_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A large body is refused with the folder that lacks room or the right to write."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refuse)
    caller = Caller()
    caller.send(b"1" + b" " * LARGE, more=False)
    with pytest.raises(Unavailable, match=f"{os.strerror(number)}; .*/dev/shm"):
        await Bodies(2 * LARGE).read(HEADERS, caller.parts.get, pid)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN"])
def test_numbers_that_no_answer_could_repeat_are_refused(number: str) -> None:
    """An answer may repeat what was asked, and JSON has no infinite numbers."""
    caller = Caller()
    caller.send(f'{{"tools": [{{"parameters": {{"maximum": {number}}}}}]}}'.encode(), more=False)
    with pytest.raises(Problem, match=f"the body is not JSON: .*{number}"):
        asyncio.run(Bodies(LARGE).read(HEADERS, caller.parts.get, len))
