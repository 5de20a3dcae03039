"""Requests that want all there is, beside small ones; one orchestrator beside another on full replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.events import ConnectVerify, Fail, VerifyFailed
from orchestrator.replicas.pool import ReplicaState
from outrider.protocol.errors import DeadlineExceeded, OutOfPages, Overloaded
from tests.fakes import INFO, FakeVerify, continuation
from tests.unit.orchestrator.rig import OFF, PROMPT, Rig, request, until
from tests.unit.orchestrator.test_session import kinds, only, session


def verify_with(places: int) -> FakeVerify:
    """A verify replica with room for so many sessions; no step runs yet."""
    verify = FakeVerify(replace(INFO, max_sessions=places))
    verify.hold.clear()
    return verify


def order(verify: FakeVerify) -> list[int]:
    """The first token of each session's prompt, in the order in which sessions began."""
    return [opening.token_ids[0] for opening in verify.openings]


async def ask(rig: Rig, prompt: int, token: str = "", **fields: Any) -> asyncio.Task[int]:
    """A request whose prompt begins with `prompt`, at the door when this returns; gives its completions."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    call = rig.stub.Generate(request((prompt, 1), mode=OFF, **{"max_tokens": 3} | fields), metadata=metadata)

    async def read() -> int:
        return sum([response.HasField("complete") async for response in call])

    before = rig.orchestrator.running()
    task = asyncio.create_task(read())
    await rig.until(lambda: rig.orchestrator.running() > before)
    return task


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """Settings under which callers are told apart by their tokens."""
    (tmp_path / "tokens").write_text("greedy\nother\nthird")
    return {"auth_tokens_file": str(tmp_path / "tokens")}


async def test_small_requests_come_before_the_rest_of_large_ones(tokens: dict[str, str]) -> None:
    """Two requests with n = 16 hold and want everything: each place that gets free goes to the small requests
    of others, by priority and then to the caller served longest ago; every continuation is answered."""
    verify = verify_with(1)
    async with Rig(verify, **tokens) as rig:
        large = [await ask(rig, prompt, "greedy", n=16) for prompt in (10, 11)]
        await rig.until(lambda: verify.sessions == 1)
        small = [
            await ask(rig, 20, "other"),
            await ask(rig, 21, "third"),
            await ask(rig, 22, "other", priority=100),
            await ask(rig, 23, "greedy", priority=5),
        ]
        verify.hold.set()
        assert await asyncio.gather(*large, *small) == [16, 16, 1, 1, 1, 1]
        assert order(verify) == [10, 22, 23, 21, 20, *[10] * 15, *[11] * 16]
        assert verify.most_sessions == 1
        assert rig.metric("requests_admitted_total") == rig.metric("queue_seconds_count") == 6


async def test_a_newcomer_does_not_wait_for_long_texts(tokens: dict[str, str]) -> None:
    """One place in sixteen is kept from a caller who wants them all: another one's request begins at once."""
    verify = verify_with(16)
    async with Rig(verify, **tokens) as rig:
        large = await ask(rig, 10, "greedy", n=16)
        await rig.until(lambda: verify.sessions == 15)
        small = await ask(rig, 20, "other")
        await rig.until(lambda: verify.sessions == 16)
        assert order(verify)[15:] == [20]
        verify.hold.set()
        assert await asyncio.gather(large, small) == [16, 1]


async def test_continuations_fill_the_replicas_and_no_more() -> None:
    """Six requests with n = 4 on two replicas with room for eight: all are used, none is asked for more."""
    verifies = verify_with(4), verify_with(4)
    async with Rig(*verifies) as rig:
        requests = [await ask(rig, prompt, n=4) for prompt in range(6)]
        await rig.until(lambda: all(verify.sessions == 4 for verify in verifies))
        assert rig.metric("requests_running") + rig.metric("requests_queued") == 6
        for verify in verifies:
            assert verify.places.waiting == 0
            verify.hold.set()
        assert await asyncio.gather(*requests) == [4] * 6
        assert [verify.most_sessions for verify in verifies] == [4, 4]
        assert rig.metric("requests_rejected_total", reason="OVERLOADED") == 0


async def test_a_setting_bounds_what_runs() -> None:
    """With `max_running` fewer continuations run than the replicas have room for."""
    verify = verify_with(8)
    async with Rig(verify, max_running=2) as rig:
        asking = await ask(rig, 10, n=5)
        await rig.until(lambda: verify.sessions == 2)
        verify.hold.set()
        assert await asking == 5
        assert verify.most_sessions == 2


async def test_full_replicas_are_waited_for_and_not_lost() -> None:
    """Replicas that refuse for lack of room, longer than the recovery time: no loss, no open breaker, no line
    in the log; the request goes on when there is room."""
    verify = FakeVerify()
    verify.refuse = Overloaded("full", 0.05)
    with capture_logs() as lines:
        async with Rig(verify, recovery_seconds=0.0, breaker_failures=1) as rig:
            asking = asyncio.create_task(rig.generate())
            await rig.until(lambda: len(verify.openings) == 4)
            assert rig.fleet.pools["verify"].count(ReplicaState.USABLE, 0.0) == 1
            verify.refuse = None
            answer = await asking
            assert answer.tokens[0] == continuation(PROMPT, 40)
            assert answer.completes[0].speculation.verify_losses == 0
            assert rig.metric("fallbacks_total", kind="verify") == 0
    assert not [line for line in lines if line["log_level"] in ("warning", "error")]


async def test_the_deadline_ends_the_wait_for_full_replicas() -> None:
    """While no replica has room, the request ends by its deadline and not before."""
    verify = FakeVerify()
    verify.refuse = Overloaded("full", 0.05)
    async with Rig(verify, recovery_seconds=0.0) as rig:
        with pytest.raises(DeadlineExceeded):
            await rig.generate(deadline=0.4)
        assert len(verify.openings) > 1


async def test_refused_requests_are_counted(tokens: dict[str, str]) -> None:
    """A caller that fills the line is refused its last request for another caller's sake, and that counts."""
    verify = verify_with(1)
    async with Rig(verify, max_queued=2, **tokens) as rig:
        first = [await ask(rig, prompt, "greedy", n=2) for prompt in (10, 11, 12)]
        other = asyncio.create_task(anext(aiter(rig.stub.Generate(request((20, 1)), metadata=(OTHER,)))))
        with pytest.raises(Exception, match="1 requests run and 2 wait"):
            await first.pop()
        assert rig.metric("requests_rejected_total", reason="OVERLOADED") == 1
        verify.hold.set()
        await asyncio.gather(other, *first)
        assert order(verify) == [10, 10, 20, 11, 11]


OTHER = ("authorization", "Bearer other")


async def test_clients_that_leave_the_line_are_gone_at_once() -> None:
    """Cancelled while nothing runs to its end: neither their place in the line nor a session is left."""
    verify = verify_with(2)
    async with Rig(verify) as rig:
        running = await ask(rig, 10, n=3)
        leaving = [await ask(rig, prompt, n=2) for prompt in (11, 12, 13)]
        for task in leaving:
            task.cancel()
        await rig.until(lambda: rig.orchestrator.running() == 1)
        await rig.until(lambda: rig.metric("requests_queued") == 0)
        verify.hold.set()
        assert await running == 3
        assert set(order(verify)) == {10}


async def test_two_orchestrators_share_a_full_replica() -> None:
    """One has filled the replica and has more in its line; the other's request has the next free place."""
    verify = verify_with(1)
    async with Rig(verify) as rig, Rig(verify=(verify.endpoint,)) as other:
        requests = [await ask(rig, 10, n=4)]
        await rig.until(lambda: verify.sessions == 1)
        requests += [await ask(other, 20, n=2)]
        await until(lambda: verify.places.waiting == 1)
        verify.hold.set()
        assert await asyncio.gather(*requests) == [4, 2]
        assert order(verify)[:2] == [10, 20]
        assert sorted(order(verify)) == [10] * 4 + [20] * 2
        assert verify.most_sessions == 1


def test_full_replicas_are_no_loss() -> None:
    """However often they refuse, another opening follows at once, and patience with losses is untouched."""
    machine, stream = session(), 1
    machine.start(0.0)
    for now in range(100):
        refused = VerifyFailed(stream, Overloaded("full", 3.0), "v:1")
        again = only(machine.handle_event(refused, float(now)), ConnectVerify)
        assert (again.not_before, again.give_up_at, again.avoid) == (0.0, now + 10.0, "")
        stream = again.stream
    assert machine.statistics.verify_losses == 0


def test_a_session_that_fits_no_pages_ends_in_time() -> None:
    """A replica that can never hold the tokens is asked again when it said, not for ever."""
    machine, now, stream = session(), 0.0, 1
    machine.start(0.0)
    error = OutOfPages("too long", 3.0)
    while not machine.finished:
        actions = machine.handle_event(VerifyFailed(stream, error, "v:1"), now)
        if ConnectVerify in kinds(actions):
            now, stream = only(actions, ConnectVerify).not_before, only(actions, ConnectVerify).stream
    assert now == pytest.approx(9.0)
    assert actions[-1] == Fail(error)


async def test_a_replica_whose_reader_was_slow_is_not_lost() -> None:
    """The session opens there again, and nothing counts against the replica."""
    verify = FakeVerify()
    verify.refuse = DeadlineExceeded("verdict: not read for 60 s")
    async with Rig(verify, breaker_failures=1) as rig:
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: len(verify.openings) > 1)
        verify.refuse = None
        assert (await asking).tokens[0] == continuation(PROMPT, 40)
        assert rig.metric("fallbacks_total", kind="verify") == 0
