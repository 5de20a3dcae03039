"""Replicas that fail, clients that leave, requests that are too many: right tokens, and nothing left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.internal.v1 import verify_pb2
from outrider.protocol.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MismatchedPair,
    Overloaded,
    Unavailable,
)
from outrider.v1 import generation_pb2_grpc
from tests.fakes import INFO, Context, FakeDraft, FakeReplica, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig, request

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""Of a channel whose window stays small: what a client does not read soon waits at the server."""


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
async def test_draft_that_dies_is_replaced(mode: int) -> None:
    """A draft lost mid-sentence costs no token; another is opened with all committed tokens and new ids."""
    drafts = FakeDraft(), FakeDraft()
    for draft in drafts:
        draft.die_at_block = 3
    async with Rig(FakeVerify(patience=0.05), *drafts) as rig:
        answer = await rig.generate(mode=mode, max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        assert answer.completes[0].speculation.draft_losses >= 2
        first, second = sorted((draft.openings[0] for draft in drafts), key=lambda o: o.first_node_id)
        assert (first.first_node_id, second.first_node_id) == (0, 1 << 40)
        assert len(second.token_ids) > len(first.token_ids) == 3
        assert second.first_step > 0
        assert rig.metric("fallbacks_total", kind="draft") >= 2


async def test_draft_that_never_opens_delays_nothing() -> None:
    """The target goes on while a draft takes its time to open."""
    draft = FakeDraft()
    draft.behaviour = "unopened"
    async with Rig(FakeVerify(patience=0.0), draft, draft_open_timeout_ms=60_000) as rig:
        answer = await rig.generate()
        assert answer.tokens[0] == continuation(PROMPT, 40)
        assert answer.completes[0].speculation.draft_losses == 0


async def test_draft_that_appears_later_is_picked_up() -> None:
    """A request that began without a draft gets one when there is one."""
    verify, draft = FakeVerify(patience=0.005), FakeDraft()
    await draft.start()
    endpoint = draft.endpoint
    await draft.kill()
    async with Rig(verify, draft=(endpoint,)) as rig:
        verify.hold.at = 6
        asking = asyncio.create_task(rig.generate(max_tokens=400))
        await rig.until(lambda: not verify.hold.is_set())
        await draft.restart()
        verify.hold.set()
        answer = await asking
        assert answer.tokens[0] == continuation(PROMPT, 400)
        assert draft.openings[0].first_step > 5
        assert answer.completes[0].speculation.accepted > 0
    await draft.kill()


async def test_mismatched_draft_is_kept_out() -> None:
    """A draft with another vocabulary is never opened; it is counted as mismatched."""
    draft = FakeDraft(replace(INFO, vocabulary_hash="other"))
    async with Rig(FakeVerify(), draft) as rig:
        answer = await rig.generate()
        assert answer.tokens[0] == continuation(PROMPT, 40)
        assert draft.openings == []
        await rig.until(lambda: rig.metric("replicas", kind="draft", state="mismatched") == 1)


@pytest.mark.parametrize(
    "error", [MismatchedPair("not mine"), Overloaded("full"), InvalidRequest("task", "no")]
)
async def test_draft_that_refuses_is_done_without(error: Exception) -> None:
    """Whatever a draft says at the open, the request goes on."""
    draft = FakeDraft()
    draft.refuse = error
    async with Rig(FakeVerify(), draft) as rig:
        answer = await rig.generate()
        assert answer.tokens[0] == continuation(PROMPT, 40)


async def test_a_draft_without_room_is_not_lost() -> None:
    """A draft that is full is asked again later; its refusals are no losses."""
    verify, draft = FakeVerify(patience=0.005), FakeDraft()
    draft.refuse = Overloaded("full", 0.0)
    async with Rig(verify, draft) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=400))
        await rig.until(lambda: len(draft.openings) > 1)
        assert (await asking).completes[0].speculation.draft_losses == 0
        assert rig.metric("fallbacks_total", kind="draft") == 0


async def test_bad_draft_is_kept_out_by_its_breaker() -> None:
    """After three malformed sessions in a row the draft is left alone."""
    draft = FakeDraft()
    draft.behaviour = "orphans"
    async with Rig(FakeVerify(patience=0.0), draft, breaker_failures=3) as rig:
        for _ in range(6):
            await rig.generate()
        assert len(draft.openings) == 3


def garbled(replica: FakeReplica, method: str) -> FakeReplica:
    """The replica, which answers one of its methods with bytes that are no message."""
    register = replica.register

    async def answer(_requests: object, context: Any) -> None:
        await context.write(b"\xff\xff\xff")

    def registered(server: grpc.aio.Server) -> None:
        handlers = {method: grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(replica.service, handlers),))
        register(server)

    replica.register = registered  # type: ignore[method-assign]
    return replica


@pytest.mark.parametrize("method", ["GetModelInfo", "Draft"])
async def test_draft_whose_messages_do_not_parse_is_done_without(method: str) -> None:
    """Neither a session nor the watch over the replicas ends with it."""
    async with Rig(FakeVerify(patience=0.005), garbled(FakeDraft(), method), FakeDraft()) as rig:
        for _ in range(3):
            assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


@pytest.mark.parametrize("method", ["GetModelInfo", "GetTokenizer", "Verify"])
async def test_verify_replica_whose_messages_do_not_parse_is_done_without(method: str) -> None:
    """The other one serves."""
    async with Rig(garbled(FakeVerify(patience=0.0), method), FakeVerify(patience=0.0)) as rig:
        for _ in range(3):
            assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
@pytest.mark.parametrize("fault", ["die_at_verdict", "end_at_verdict", "skew_at_verdict"])
async def test_verify_replica_lost_mid_sentence(mode: int, fault: str) -> None:
    """The text continues on another verify replica with the same tokens; the draft stays as it is."""
    verifies = FakeVerify(patience=0.5), FakeVerify(patience=0.5)
    draft = FakeDraft()
    for verify in verifies:
        setattr(verify, fault, 4)
    async with Rig(*verifies, draft) as rig:
        answer = await rig.generate(mode=mode, max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        assert answer.completes[0].speculation.verify_losses >= 1
        assert answer.completes[0].speculation.draft_losses == 0
        assert len(draft.openings) == (0 if mode == OFF else 1)
        second = max((o for v in verifies for o in v.openings), key=lambda o: len(o.token_ids))
        assert second.first_step >= 4
        assert second.prompt_length == 3


async def test_new_verify_replica_gets_the_live_candidates() -> None:
    """After a verify loss the draft's running chain is accepted at once, although its anchor is long gone."""
    verifies = FakeVerify(patience=1.0), FakeVerify(patience=2.0)
    for verify in verifies:
        verify.die_at_verdict = 5
    async with Rig(*verifies, FakeDraft()) as rig:
        answer = await rig.generate(max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        second = max(verifies, key=lambda verify: len(verify.openings[0].token_ids))
        assert second.accepted >= 5


async def test_only_verify_replica_restarts() -> None:
    """With one verify replica, the request waits until it is back and then goes on."""
    async with Rig(verify := FakeVerify(patience=0.002), FakeDraft()) as rig:
        verify.hold.at = 6
        asking = asyncio.create_task(rig.generate(max_tokens=300))
        await rig.until(lambda: not verify.hold.is_set())
        await verify.kill()
        verify.hold.set()
        await verify.restart()
        answer = await asking
        assert answer.tokens[0] == continuation(PROMPT, 300)
        assert answer.completes[0].speculation.verify_losses == 1


async def test_no_verify_replica_within_the_recovery_time() -> None:
    """When none comes back in time, the request ends with UNAVAILABLE, and so does one that came later."""
    async with Rig(verify := FakeVerify(), FakeDraft(), recovery_seconds=0.4) as rig:
        verify.hold.clear()
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        await verify.kill()
        with pytest.raises(Unavailable):
            await asking
        with pytest.raises(Unavailable, match="no verify replica"):
            await rig.generate()
        verify.hold.set()


async def test_serving_again_when_a_verify_replica_is_back() -> None:
    """The orchestrator's door opens again by itself."""
    async with Rig(verify := FakeVerify()) as rig:
        await verify.kill()
        await rig.until(lambda: rig.fleet.pools["verify"].find(verify.endpoint).missed_probes > 0)
        await verify.restart()
        await rig.until(lambda: rig.fleet.pools["verify"].find(verify.endpoint).missed_probes == 0)
        assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


async def test_a_request_that_comes_while_no_replica_can_be_used_waits_for_one() -> None:
    """Health says that others are better asked; who asks all the same is served once a replica is back."""
    async with Rig(verify := FakeVerify()) as rig:
        await verify.kill()
        await rig.until(lambda: rig.fleet.pools["verify"].find(verify.endpoint).missed_probes > 0)
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: rig.orchestrator.running() == 1)
        health = health_pb2_grpc.HealthStub(rig.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await verify.restart()
        assert (await asking).tokens[0] == continuation(PROMPT, 40)


async def test_both_replicas_lost_at_once() -> None:
    """Draft and verify replica die together; the others take over."""
    verifies = FakeVerify(patience=0.01), FakeVerify(patience=0.01)
    drafts = FakeDraft(), FakeDraft()
    async with Rig(*verifies, *drafts) as rig:
        for verify in verifies:
            verify.hold.at = 6
        asking = asyncio.create_task(rig.generate(max_tokens=400))
        await rig.until(lambda: not all(verify.hold.is_set() for verify in verifies))
        lost = [replica for replica in (*verifies, *drafts) if replica.sessions]
        for verify in verifies:
            verify.hold.at = None
        for replica in lost:
            await replica.kill()
        answer = await asking
        assert answer.tokens[0] == continuation(PROMPT, 400)
        assert answer.completes[0].speculation.verify_losses == 1


async def test_request_that_breaks_every_verify_replica_is_given_up() -> None:
    """A request on which verify replicas fail internally is not tried forever."""
    verify = FakeVerify()
    verify.refuse = InternalError("poison")
    async with Rig(verify, breaker_failures=100) as rig:
        with pytest.raises(InternalError, match="poison"):
            await rig.generate()
        assert len(verify.openings) == 3


async def test_faults_of_the_request_are_not_retried() -> None:
    """What a verify replica finds wrong with the request goes to the caller as it is."""
    verify = FakeVerify()
    verify.refuse = InvalidRequest("sampling.top_k", "too clever")
    async with Rig(verify, FakeDraft()) as rig:
        with pytest.raises(InvalidRequest) as caught:
            await rig.generate()
        assert caught.value.field == "sampling.top_k"
        assert len(verify.openings) == 1
        assert rig.metric("fallbacks_total", kind="verify") == 0


async def test_full_verify_replica_sends_the_request_to_another() -> None:
    """A verify replica without room costs nothing when another has some."""
    verifies = FakeVerify(), FakeVerify()
    async with Rig(*verifies) as rig:
        for verify in verifies:
            verify.refuse = Overloaded("full", 0.1)
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: all(verify.openings for verify in verifies))
        verifies[0].refuse = None
        answer = await asking
        assert answer.tokens[0] == continuation(PROMPT, 40)
        assert answer.completes[0].speculation.verify_losses == 0


async def test_cancel_stops_everything() -> None:
    """A client that leaves mid-stream frees both replicas, the slot and every task."""
    verify, draft = FakeVerify(patience=0.002), FakeDraft()
    async with Rig(verify, draft) as rig:
        call = rig.stub.Generate(request(max_tokens=400))
        await call.read()
        call.cancel()
        await rig.quiet()
        assert verify.most_sessions == 1
        await rig.until(lambda: rig.metric("requests_finished_total", reason="cancelled") == 1)


async def test_deadline_stops_everything() -> None:
    """When the deadline passes the caller gets DEADLINE_EXCEEDED and nothing runs on."""
    verify, draft = FakeVerify(), FakeDraft()
    async with Rig(verify, draft, default_deadline_seconds=0.2) as rig:
        verify.hold.clear()
        with pytest.raises(DeadlineExceeded, match="the deadline passed"):
            await rig.generate(deadline=None)
        verify.hold.set()


async def test_more_requests_than_may_wait_are_refused() -> None:
    """One runs, one waits, the third is told when to come back; the first two finish."""
    verify = FakeVerify()
    async with Rig(verify, max_running=1, max_queued=1) as rig:
        verify.hold.clear()
        first = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        second = asyncio.create_task(rig.generate())
        await rig.until(lambda: rig.orchestrator.running() == 2)
        with pytest.raises(Overloaded) as caught:
            await rig.generate()
        assert caught.value.retry_after > 0
        assert rig.metric("requests_rejected_total", reason="OVERLOADED") == 1
        verify.hold.set()
        assert (await first).tokens[0] == (await second).tokens[0] == continuation(PROMPT, 40)
        assert verify.most_sessions == 1


async def test_deadline_that_passes_in_the_queue() -> None:
    """A request that waits too long leaves the queue with DEADLINE_EXCEEDED."""
    verify = FakeVerify()
    async with Rig(verify, max_running=1) as rig:
        verify.hold.clear()
        first = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        with pytest.raises(DeadlineExceeded):
            await rig.generate(deadline=0.2)
        verify.hold.set()
        await first
        assert len(verify.openings) == 1


async def read_all(call: Any) -> int:
    """Read a stream to its end; returns the number of its tokens."""
    count = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        count += len(response.chunk.token_ids)
    return count


async def test_slow_client_slows_the_target() -> None:
    """A client that does not read makes the verify replica wait, while another is served as many steps as the
    first has asked for; when the first reads again it gets everything."""
    tokens = 2000
    verify = FakeVerify(replace(INFO, context_length=100_000), patience=0.0)
    verify.ballast = 500
    async with Rig(verify) as rig:
        channel = grpc.aio.insecure_channel(rig.server.endpoint, options=SMALL_WINDOW)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        slow = stub.Generate(request(mode=OFF, max_tokens=tokens, logprobs=0))
        await slow.read()
        other = rig.stub.Generate(request(mode=OFF, max_tokens=tokens))
        assert await read_all(other) == tokens
        assert verify.verdicts < 1.9 * tokens
        assert await read_all(slow) == tokens
        await channel.close()


async def test_a_client_that_does_not_read_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while its stream ends with DEADLINE_EXCEEDED, and nothing is left of the request."""
    monkeypatch.setattr("orchestrator.servicer.UNREAD_SECONDS", 0.2)
    verify = FakeVerify(replace(INFO, context_length=100_000), patience=0.0)
    verify.ballast = 500
    async with Rig(verify) as rig:
        async with grpc.aio.insecure_channel(rig.server.endpoint, options=SMALL_WINDOW) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            unread = stub.Generate(request(mode=OFF, max_tokens=90_000, logprobs=0))
            await unread.read()
            await rig.quiet()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read_all(unread)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_many_requests_with_random_ends_leave_nothing() -> None:
    """Requests that finish, are cancelled or time out, all at once: afterwards nothing is left."""
    async with Rig(FakeVerify(patience=0.002), FakeVerify(patience=0.002), FakeDraft(), FakeDraft()) as rig:

        async def one(number: int) -> None:
            asking = asyncio.create_task(rig.generate((number, 1, 2), max_tokens=30))
            if number % 3 == 1:
                await asyncio.sleep(0.001 * number)
                asking.cancel()
                await asyncio.wait({asking})
            else:
                assert (await asking).tokens[0] == continuation((number, 1, 2), 30)

        await asyncio.gather(*map(one, range(40)))


class ClosingVerify(FakeVerify):
    """Closes every session before its first verdict, and keeps it; then it ends the stream, or does not."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends

    async def _steps(self, session: Any, context: Context) -> None:
        closed = verify_pb2.VerifyClosed(kv_handle=self._handle(session.tree.committed[:-1]))
        await context.write(verify_pb2.VerifyResponse(closed=closed))
        if self.ends:
            session.closed.set()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_verify_replica_that_closes_sessions_by_itself_is_given_up(ends: bool) -> None:
    """The request fails like one whose replica is broken; it neither waits for more nor tries for ever."""
    async with Rig(ClosingVerify(ends), breaker_seconds=0.1) as rig:
        with pytest.raises(InternalError, match="closed the session by itself"):
            await rig.generate(mode=OFF)
