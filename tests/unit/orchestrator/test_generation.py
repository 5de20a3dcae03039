"""Whole requests between scripted replicas: the tokens are the target's, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from outrider.protocol.errors import ModelGone
from outrider.v1 import generation_pb2_grpc, tokens_pb2
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig, request


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
@pytest.mark.parametrize(
    "behaviour", ["right", "wrong", "garbage", "columns", "orphans", "repeated", "silent", "unopened"]
)
async def test_tokens_do_not_depend_on_mode_or_draft(mode: int, behaviour: str) -> None:
    """Every mode gives the target's tokens with any draft, sound or not."""
    draft = FakeDraft()
    draft.behaviour = behaviour
    async with Rig(FakeVerify(), draft) as rig:
        answer = await rig.generate(mode=mode)
        assert answer.tokens[0] == continuation(PROMPT, 40)
        assert answer.completes[0].finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        assert answer.completes[0].usage.completion_tokens == 40


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
async def test_right_drafts_are_accepted(mode: int) -> None:
    """A draft that knows the target saves most of the steps, and the statistics say so."""
    verify, draft = FakeVerify(patience=1.0), FakeDraft()
    async with Rig(verify, draft) as rig:
        answer = await rig.generate(mode=mode)
        statistics = answer.completes[0].speculation
        assert statistics.steps <= 25
        assert statistics.accepted == verify.accepted >= 15
        assert statistics.verified == verify.verified
        assert statistics.drafted >= statistics.accepted
        assert statistics.acceptance_length == pytest.approx(40 / statistics.steps)
        assert statistics.draft_losses == statistics.verify_losses == 0
        assert statistics.forward_micros == 100 * statistics.steps
        assert [verdict.step for verdict in draft.verdicts] == list(range(1, statistics.steps + 1))


async def test_a_draft_with_a_wider_output_layer_is_kept() -> None:
    """It may propose tokens of its padding, which the target does not have."""
    draft = FakeDraft()
    draft.behaviour = "garbage"
    async with Rig(FakeVerify(), draft) as rig:
        statistics = (await rig.generate(mode=AUTO)).completes[0].speculation
        assert (statistics.draft_losses, statistics.accepted) == (0, 0)
        assert len(draft.openings) == 1


async def test_mode_off_asks_no_draft() -> None:
    """MODE_OFF opens no draft session and lets the verify replica propose nothing."""
    verify, draft = FakeVerify(), FakeDraft()
    async with Rig(verify, draft) as rig:
        await rig.generate(mode=OFF)
        assert draft.openings == []
        assert verify.blocks == []
        assert not verify.openings[0].lookup


async def test_sequential_mode_without_drafts_does_not_wait() -> None:
    """In MODE_SEQUENTIAL without a draft the target is told to take every step."""
    verify = FakeVerify(patience=60.0)
    async with Rig(verify) as rig:
        answer = await rig.generate(mode=SEQUENTIAL)
        assert answer.tokens[0] == continuation(PROMPT, 40)


async def test_sampled_requests_report_their_seed() -> None:
    """A sampled request without a seed gets one, reports it, and gives the same tokens again with it."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        first = await rig.generate(temperature=1.0)
        seed = first.completes[0].seed
        again = await rig.generate(temperature=1.0, seed=seed)
        greedy = await rig.generate(seed=7)
        assert first.tokens[0] == again.tokens[0] == continuation(PROMPT, 40, seed)
        assert greedy.completes[0].seed == 0


async def test_continuations_use_successive_seeds() -> None:
    """n = 3 gives three continuations, each with its own index, seed and completion."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        answer = await rig.generate(temperature=1.0, seed=2**64 - 1, n=3)
        for index, seed in enumerate([2**64 - 1, 0, 1]):
            assert answer.tokens[index] == continuation(PROMPT, 40, seed)
            assert answer.completes[index].seed == seed
        assert rig.metric("requests_admitted_total") == 1
        assert rig.metric("tokens_total") == 120


async def test_logprobs_come_with_their_tokens() -> None:
    """With logprobs, every token of every chunk has its entry."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        answer = await rig.generate(logprobs=0)
        assert [logprob.token for logprob in answer.logprobs] == answer.tokens[0]


async def test_stop_tokens_end_the_text() -> None:
    """A stop token ends the generation with reason STOP and is part of the tokens."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        expected = continuation(PROMPT, 40)
        stop = next(token for token in expected if expected.index(token) >= 12)
        answer = await rig.generate(stop_token_ids=[stop])
        assert answer.tokens[0] == expected[: expected.index(stop) + 1]
        assert answer.completes[0].finish_reason == tokens_pb2.FINISH_REASON_STOP


async def test_resume_continues_a_cut_stream() -> None:
    """With the tokens received so far, the rest follows and is counted from the prompt."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        expected = continuation(PROMPT, 40, seed=5)
        answer = await rig.generate(temperature=1.0, seed=5, resume_token_ids=expected[:17])
        assert answer.tokens[0] == expected[17:]
        assert answer.completes[0].usage.completion_tokens == 40
        assert answer.completes[0].usage.prompt_tokens == 3
        assert verify.openings[0].prompt_length == 3


async def test_resume_of_a_finished_stream_ends_at_once() -> None:
    """When the received tokens are all there is, only the completion follows and no replica is asked."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        answer = await rig.generate(resume_token_ids=continuation(PROMPT, 40))
        assert answer.tokens == {}
        assert answer.completes[0].finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        assert verify.openings == []


async def test_kept_sessions_are_continued() -> None:
    """The next turn sends only what is new when its prompt continues the kept session."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        first = await rig.generate(keep_session=True)
        prompt = [*PROMPT, *first.tokens[0], 1, 2]
        second = await rig.generate(prompt, session=first.completes[0].session)
        assert second.tokens[0] == continuation(prompt, 40)
        assert verify.openings[1].kv_handle is not None
        assert list(verify.openings[1].token_ids) == prompt[42:]


async def test_stale_sessions_are_prefilled_again() -> None:
    """A session whose lease has ended costs a prefill, not an error."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        first = await rig.generate(keep_session=True)
        verify.handles.clear()
        prompt = [*PROMPT, *first.tokens[0], 1, 2]
        second = await rig.generate(prompt, session=first.completes[0].session)
        assert second.tokens[0] == continuation(prompt, 40)
        assert [opening.kv_handle is None for opening in verify.openings] == [True, False, True]
        assert second.completes[0].speculation.verify_losses == 0


async def test_sessions_of_another_text_are_not_used() -> None:
    """A prompt that does not begin with the session's tokens is prefilled without asking for them."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        first = await rig.generate(keep_session=True)
        prompt = [*PROMPT, *first.tokens[0], 1, 2]
        prompt[5] ^= 1
        second = await rig.generate(prompt, session=first.completes[0].session)
        assert second.tokens[0] == continuation(prompt, 40)
        assert verify.openings[1].kv_handle is None


async def test_timeline_has_bars_of_all_lanes() -> None:
    """record_timeline returns draft, wire and verify bars with the replicas' own times."""
    async with Rig(FakeVerify(patience=1.0), FakeDraft()) as rig:
        complete = (await rig.generate(record_timeline=True)).completes[0]
        lanes = [(event.lane, event.name) for event in complete.timeline]
        assert {(1, "block"), (2, "block"), (3, "verify"), (2, "verdict")} == set(lanes)
        verify = [event for event in complete.timeline if event.lane == 3]
        assert [event.step for event in verify] == list(range(1, complete.speculation.steps + 1))
        assert verify[0].start_unix_nano == 1_000_000_000
        assert verify[0].duration_micros == 105
        assert (await rig.generate()).completes[0].timeline == []


async def test_a_draft_whose_clock_is_wrong_costs_only_the_picture() -> None:
    """Its blocks end later than the timeline can say."""
    draft = FakeDraft()
    draft.expand_start_unix_nano = 2**64 - 1
    async with Rig(FakeVerify(patience=1.0), draft) as rig:
        answer = await rig.generate(record_timeline=True, record_steps=True)
        assert answer.tokens[0] == continuation(PROMPT, 40)
        assert any(event.start_unix_nano == 2**64 - 1 for event in answer.completes[0].timeline)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_begins_with_what_resuming_it_takes(temperature: float) -> None:
    """The first event names request, model, prompt, cached tokens and the seed, whoever chose it."""
    async with Rig(verify := FakeVerify(), FakeDraft()) as rig:
        verify.cached = 2
        call = rig.stub.Generate(request(temperature=temperature))
        events = [response async for response in call]
        started, complete = events[0].started, events[-1].complete
        assert [event.WhichOneof("event") for event in events].count("started") == 1
        assert (started.request_id, started.seed) == (complete.request_id, complete.seed)
        assert (started.model, started.prompt_tokens, started.cached_tokens) == ("fake", 3, 2)
        assert started.seed == verify.openings[0].sampling.seed


async def test_a_stream_without_a_seed_is_resumed_with_that_of_its_beginning() -> None:
    """What was received before the stream was cut is enough to get exactly the rest."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        call = rig.stub.Generate(request(temperature=1.0, max_tokens=300))
        started, tokens = (await call.read()).started, []
        while len(tokens) < 17:
            tokens += (await call.read()).chunk.token_ids
        call.cancel()
        rest = await rig.generate(temperature=1.0, max_tokens=300, seed=started.seed, resume_token_ids=tokens)
        assert [*tokens, *rest.tokens[0]] == continuation(PROMPT, 300, started.seed)


async def test_a_text_is_resumed_with_its_own_weights_alone() -> None:
    """Its beginning names them. Where others are served, the rest is refused; without a name, or where the
    replica has none, the model's name decides."""
    expected, verify = continuation(PROMPT, 40), FakeVerify(replace(INFO, version="old"))
    async with Rig(verify) as rig:
        version = (await rig.generate()).starts[0].model_version
        assert version == "old"
        rest = await rig.generate(model_version=version, resume_token_ids=expected[:17])
        assert rest.tokens[0] == expected[17:]
        await _come_back(rig, verify, "new")
        with pytest.raises(ModelGone, match="other weights"):
            await rig.generate(model_version=version, resume_token_ids=expected[:17])
        assert (await rig.generate()).starts[0].model_version == "new"
        await _come_back(rig, verify, "")
        await rig.generate(model_version=version, resume_token_ids=expected[:17])


async def _come_back(rig: Rig, verify: FakeVerify, version: str) -> None:
    """The replica is started again with these weights, and with more context: then all of it is new."""
    longer = verify.info.context_length + 1
    verify.info = replace(verify.info, incarnation=f"of {version}", version=version, context_length=longer)
    await rig.until(lambda: rig.fleet.served is not None and rig.fleet.served.info == verify.info)


async def test_every_continuation_begins_with_its_own_seed() -> None:
    """With n = 2 each can be resumed by a request of its own."""
    async with Rig(FakeVerify()) as rig:
        answer = await rig.generate(temperature=1.0, seed=8, n=2)
        assert [answer.starts[index].seed for index in (0, 1)] == [8, 9]


async def test_a_continuation_begins_once() -> None:
    """A verify replica that is lost before the first token does not have it announced again."""
    async with Rig(FakeVerify(), FakeVerify()) as rig:
        for replica in rig.replicas:
            replica.die_at_verdict = 0
        answer = await rig.generate()  # `Answer` refuses a second beginning
        assert answer.tokens[0] == continuation(PROMPT, 40)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
async def test_steps_are_told_to_those_who_asked(mode: int) -> None:
    """Where each token came from, and each step with its nodes and times; the tokens are the same."""
    verify, draft = FakeVerify(patience=1.0), FakeDraft()
    async with Rig(verify, draft) as rig:
        asked = await rig.generate(mode=mode, record_steps=True)
        plain = await rig.generate(mode=mode)
    assert asked.tokens == plain.tokens
    counts = asked.completes[0].speculation
    assert [step.step for step in asked.steps] == list(range(1, counts.steps + 1))
    assert sum(len(step.nodes) for step in asked.steps) == counts.verified
    assert sum(node.accepted for step in asked.steps for node in step.nodes) == counts.accepted
    origins = [tokens_pb2.TokenOrigin.Name(origin) for origin in asked.origins]
    assert len(origins) == len(asked.tokens[0])
    assert origins.count("TOKEN_ORIGIN_DRAFT") == counts.accepted
    assert all(step.timeline for step in asked.steps)
    assert (plain.steps, plain.origins) == ([], [])
    assert [opening.record_steps for opening in verify.openings] == [True, False]
    assert all(verdict.nodes is None for verdict in draft.verdicts), "the draft has no use for them"


async def test_a_text_whose_end_was_not_read_is_counted() -> None:
    """A client that leaves before it has read the end got a text that was computed as a whole."""
    verify = FakeVerify()
    verify.ballast = 500
    async with Rig(verify) as rig:
        options = [("grpc.http2.bdp_probe", 0)]  # keep the window small
        async with grpc.aio.insecure_channel(rig.server.endpoint, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(request(mode=OFF, max_tokens=40, logprobs=0))
            await call.read()
            await rig.until(lambda: verify.verdicts == 40 and verify.sessions == 0)
            assert rig.metric("requests_running") == 1
            call.cancel()
        await rig.quiet()
        assert rig.metric("tokens_total") == 40
        assert rig.metric("requests_finished_total", reason="cancelled") == 1
        assert rig.metric("requests_finished_total", reason="length") == 0
