"""The public service as a client sees it: text, stop strings, statuses, tokens at the edge, spans."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from orchestrator.text.jobs import INLINE_BYTES
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizer_process import TokenizerProcess
from outrider.protocol.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, UnknownModel
from outrider.telemetry import spans
from outrider.v1 import generation_pb2, tokens_pb2
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig, request
from tests.unit.orchestrator.text.test_text_stream import byte_level
from tests.unit.orchestrator.text.test_tokenizer import TEMPLATE
from tests.unit.orchestrator.text.test_tokenizer import tokenizer as with_template

DETAILS = [
    ("all", 0.0, {"prefill", "speculation.step"}),
    ("slow", 0.0, {"prefill", "speculation.step"}),
    ("slow", 60.0, {"prefill"}),
    ("none", 0.0, {"prefill"}),
]


def text_verify(bos: bool = False, **files: Any) -> FakeVerify:
    """A verify replica whose model has a byte-level tokenizer; `bos`: <s> begins a text."""
    data = with_template(bos=bos).files.tokenizer_json
    return FakeVerify(tokenizer_json=data, special_tokens={"bos_token": "<s>"}, **files)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
async def test_text_is_streamed(mode: int) -> None:
    """A text prompt is answered with the text of the target's tokens."""
    tokenizer = byte_level()
    async with Rig(text_verify(), FakeDraft()) as rig:
        answer = await rig.generate(text="def f():", mode=mode)
        prompt = tokenizer.encode("def f():")
        assert answer.tokens[0] == continuation(prompt, 40)
        assert answer.text[0] == tokenizer.decode(answer.tokens[0])
        assert answer.completes[0].usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
async def test_stop_string_ends_the_stream(mode: int) -> None:
    """The text is cut before the stop string, the sessions are closed, the completion says which it was."""
    tokenizer = byte_level()
    expected = continuation(PROMPT, 400)
    text = tokenizer.decode(expected)
    pairs = ((at, text[at : at + 2]) for at in range(30, 100))
    at, stop = next((at, pair) for at, pair in pairs if pair.isascii() and text.find(pair) == at)
    needed = next(n for n in range(400) if stop in tokenizer.decode(expected[:n]))
    async with Rig(text_verify(), FakeDraft()) as rig:
        answer = await rig.generate(mode=mode, stop=["never seen", stop], max_tokens=400)
        complete = answer.completes[0]
        assert answer.text[0] == text[:at]
        assert (complete.finish_reason, complete.stop) == (tokens_pb2.FINISH_REASON_STOP, stop)
        assert complete.usage.completion_tokens == needed


async def test_stop_string_wins_over_the_length() -> None:
    """A stop string completed by the very last token is the reason, not the length."""
    text = byte_level().decode(continuation(PROMPT, 10))
    async with Rig(text_verify()) as rig:
        answer = await rig.generate(stop=[text[-2:]], max_tokens=10)
        assert answer.text[0] == text[:-2]
        assert answer.completes[0].finish_reason == tokens_pb2.FINISH_REASON_STOP


async def test_chat_uses_the_models_template() -> None:
    """A conversation is rendered with the template that the verify replica hands over."""
    verify = text_verify(chat_template=TEMPLATE)
    async with Rig(verify) as rig:
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
        answer = await rig.generate(chat=chat)
        assert byte_level().decode(verify.openings[0].token_ids) == "user: hi\nassistant:"
        assert answer.starts[0].prompt_end.endswith("\nassistant:")
        assert (await rig.generate(text="hi")).starts[0].prompt_end == ""
        info = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert info.chat_prompts
        assert info.text_prompts


def long_text(tokens: int) -> str:
    """More than is tokenized on the event loop; the vocabulary has a token for four characters of it."""
    return "hell" * tokens


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_long_prompts_are_answered_like_short_ones(kind: str) -> None:
    """Tokenized in another process, which ends with the orchestrator."""
    verify = text_verify(info=replace(INFO, context_length=4096, vocabulary_size=300), chat_template=TEMPLATE)
    async with Rig(verify) as rig:
        content = long_text(1500)
        if kind == "text":
            await rig.generate(text=content)
            expected = content
        else:
            messages = [generation_pb2.ChatMessage(role="user", content=content)]
            await rig.generate(chat=generation_pb2.Chat(messages=messages))
            expected = f"user: {content}\nassistant:"
        assert byte_level().decode(verify.openings[0].token_ids) == expected
        process = rig.orchestrator.servicer.tokenizing._worker
        assert isinstance(process, TokenizerProcess)
    assert process._process.returncode is not None


@pytest.mark.parametrize("size", [3, INLINE_BYTES + 1])
async def test_a_predicted_text_reaches_the_verify_replica_as_tokens(size: int) -> None:
    """Short ones, and long ones, which another process tokenizes."""
    verify, predicted = text_verify(info=replace(INFO, context_length=8192)), "x" * size
    async with Rig(verify) as rig:
        pb = request(max_tokens=4)
        pb.speculation.prediction.text = predicted
        async for _ in rig.stub.Generate(pb, timeout=20.0):
            pass
    assert verify.openings[0].prediction == byte_level().encode(predicted, special_tokens=False)


async def test_long_prompts_that_do_not_fit_name_their_field() -> None:
    """By their bytes at once, by their tokens when they have been counted; each is counted as rejected."""
    async with Rig(text_verify(info=replace(INFO, context_length=2048))) as rig:
        for content in (long_text(3000), "x" * 5000):
            with pytest.raises(ContextTooLong) as caught:
                await rig.generate(text=content)
            assert caught.value.field == "text"
        assert rig.metric("requests_rejected_total", reason="CONTEXT_TOO_LONG") == 2
        assert (await rig.generate(text="x")).completes


class Never:
    """A process that never answers."""

    leaving = False

    async def start(self, tokenizer: TextTokenizer) -> Never:
        """Of `Tokenizing`."""
        self.tokenizer = tokenizer
        return self

    async def ask(self, prompt: object, positions: int) -> None:
        """Of `Worker`."""
        await asyncio.Event().wait()

    async def end(self) -> int:
        """Of `Worker`."""
        return 0


async def test_a_prompt_that_waits_is_bounded_and_holds_up_nobody() -> None:
    """Its deadline ends it, a drain waits for it, and short requests pass it."""
    async with Rig(text_verify(info=replace(INFO, context_length=4096, vocabulary_size=300))) as rig:
        rig.orchestrator.servicer.tokenizing._start = Never().start
        content = long_text(1500)
        waiting = asyncio.create_task(rig.generate(text=content, deadline=1.0))
        await rig.until(lambda: rig.orchestrator.running() == 1)
        assert (await rig.generate(text="hello")).completes
        with pytest.raises(DeadlineExceeded):
            await waiting


async def test_model_info() -> None:
    """GetModelInfo says what is served, by how many replicas, and which prompts can be used."""
    async with Rig(FakeVerify(), FakeVerify(), FakeDraft()) as rig:
        await rig.until(lambda: len(rig.fleet.pools["verify"].usable(0.0)) == 2)
        info = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert (info.target.model, info.verify_replicas, info.draft_replicas) == ("fake", 2, 1)
        assert not info.text_prompts


LONG_ID = "x" * 129


@pytest.mark.parametrize(("given", "kept"), [("my-id", True), ("", False), ("a b", False), (LONG_ID, False)])
async def test_a_callers_request_id_is_kept(given: str, kept: bool) -> None:
    """In `Started` and `Complete`; one is made where it gave none that can be kept."""
    async with Rig(FakeVerify()) as rig:
        metadata = (("x-request-id", given),)
        call = rig.stub.Generate(request(PROMPT), metadata=metadata, timeout=20.0)
        answer = [response async for response in call]
        ids = {answer[0].started.request_id, answer[-1].complete.request_id}
        assert (ids == {given}) == kept
        assert len(ids) == 1
        assert "" not in ids


async def test_bad_requests_are_counted_and_harm_nothing() -> None:
    """A wrong field comes back named, an unknown model as NOT_FOUND; the next request works."""
    async with Rig(FakeVerify()) as rig:
        with pytest.raises(InvalidRequest) as caught:
            await rig.generate(top_p=2.0)
        assert caught.value.field == "sampling.top_p"
        with pytest.raises(UnknownModel):
            await rig.generate(model="gpt-5")
        assert rig.metric("requests_rejected_total", reason="INVALID_REQUEST") == 1
        assert rig.metric("requests_rejected_total", reason="UNKNOWN_MODEL") == 1
        assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


async def test_the_queue_counts_in_the_time_to_the_first_token() -> None:
    """A request that waited four seconds for its turn has its first token four seconds after it came."""
    now = 100.0
    async with Rig(verify := FakeVerify(), clock=lambda: now, max_running=1) as rig:
        verify.hold.clear()
        held = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        queued = asyncio.create_task(rig.generate())
        await rig.until(lambda: rig.orchestrator.servicer.admission.queue.queued == 1)
        now += 4.0
        verify.hold.set()
        await held
        speculation = (await queued).completes[0].speculation
        assert speculation.admission_micros == speculation.first_token_micros == 4_000_000
        assert speculation.total_micros == 4_000_000
        for histogram in ("time_to_first_token", "request"):
            assert rig.metric(f"{histogram}_seconds_sum", model=INFO.model) == 8.0
        assert (rig.metric("queue_seconds_sum"), rig.metric("queue_seconds_count")) == (4.0, 2)


async def test_what_callers_feel_is_counted() -> None:
    """Lengths of prompt and output, and every pause between two deliveries, by model."""
    async with Rig(FakeVerify(patience=0.0)) as rig:
        answer = await rig.generate(max_tokens=12)
        of = {"model": INFO.model}
        assert rig.metric("prompt_tokens_sum", **of) == len(PROMPT)
        assert rig.metric("output_tokens_sum", **of) == len(answer.tokens[0]) == 12
        assert rig.metric("output_tokens_count", **of) == 1
        deliveries = rig.metric("delivery_gap_seconds_count", **of) + 1
        assert deliveries == rig.metric("steps_total", task="none", draft="none")
        assert rig.metric("prompt_tokens_cached_total", **of) == 0


@pytest.mark.parametrize(("later", "reason"), [(0.0, "cancelled"), (59.0, "deadline_exceeded")])
async def test_a_callers_own_deadline_is_counted_as_one(later: float, reason: str) -> None:
    """When a caller's time is over, gRPC cancels its call before ours ends; it has not lost interest."""
    verify, ahead = FakeVerify(), 0.0
    async with Rig(verify, max_running=1, clock=lambda: time.monotonic() + ahead) as rig:
        verify.hold.clear()
        running, waiting = (rig.stub.Generate(request(), timeout=60) for _ in range(2))
        await rig.until(lambda: rig.orchestrator.running() == 2 and verify.sessions == 1)
        ahead = later
        running.cancel()
        waiting.cancel()
        await rig.quiet()
        assert rig.metric("requests_finished_total", reason=reason) == 1
        assert rig.metric("requests_rejected_total", reason="DEADLINE_EXCEEDED") == (later > 0)
        verify.hold.set()


@pytest.mark.parametrize(("drafts", "missed"), [((), False), (("127.0.0.1:1",), True)])
async def test_drafts_are_missed_only_where_they_are_set_up(drafts: tuple[str, ...], missed: bool) -> None:
    """A service without drafts asks for none and needs no alert; one whose drafts are all down does."""
    async with Rig(FakeVerify(), draft=drafts) as rig:
        await rig.generate()
        assert (rig.metric("draft_missing_seconds_total") > 0) == missed
        assert (rig.metric("draft_wanted_seconds_total") > 0) == missed


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_request_has_a_log_line(wanted: bool) -> None:
    """Its counts, times and replicas; neither text nor tokens; and none where nobody wants it."""
    with capture_logs() as lines:
        async with Rig(FakeVerify(), request_log=wanted) as rig:
            await rig.generate(max_tokens=12)
            endpoint = rig.replicas[0].endpoint
    found = [line for line in lines if line["event"] == "request ended"]
    assert len(found) == wanted
    for line in found:
        assert (line["status"], line["model"], line["finish_reasons"]) == ("OK", INFO.model, ["length"])
        assert (line["prompt_tokens"], line["output_tokens"], line["steps"] > 0) == (len(PROMPT), 12, True)
        assert (line["verify"], line["draft"]) == ([endpoint], [])
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
        assert not {"text", "prompt", "tokens", "token_ids"} & line.keys()


async def test_what_was_done_for_a_text_that_is_cut_off_is_reported(exporter: InMemorySpanExporter) -> None:
    """Tokens, steps and replicas of a request that was cancelled are in its log line, metrics and span."""
    verify = FakeVerify()
    with capture_logs() as logged:
        async with Rig(verify) as rig:
            call = rig.stub.Generate(request(max_tokens=400, labels={"team": "a"}))
            await rig.until(lambda: verify.verdicts > 3)
            verify.hold.clear()
            received = 0
            while received < verify.verdicts:
                received += len((await call.read()).chunk.token_ids)
            call.cancel()
            await rig.quiet()
            verify.hold.set()
            assert rig.metric("tokens_total") == received
            assert rig.metric("labelled_tokens_total", label="team", value="a") == received
    (line,) = [line for line in logged if line["event"] == "request ended"]
    assert (line["status"], line["finish_reasons"]) == ("CANCELLED", [])
    assert (line["output_tokens"], line["verify"], line["steps"] > 3) == (received, [verify.endpoint], True)
    (root,) = [span for span in exporter.get_finished_spans() if span.name.startswith("text_completion")]
    assert root.attributes["gen_ai.usage.output_tokens"] == received
    assert root.attributes["outrider.steps"] == line["steps"]
    assert "gen_ai.response.finish_reasons" not in root.attributes


@pytest.mark.parametrize(("detail", "slow", "names"), DETAILS)
async def test_the_detail_of_traces(
    exporter: InMemorySpanExporter, detail: str, slow: float, names: set[str]
) -> None:
    """Steps have spans where they are wanted; the replicas record nothing unless all are."""
    verify = FakeVerify()
    async with Rig(verify, trace_detail=detail, trace_slow_seconds=slow) as rig:
        message = generation_pb2.GenerateRequest(token_ids=tokens_pb2.TokenIds(ids=PROMPT))
        message.sampling.max_tokens = 20
        metadata = (("traceparent", f"00-{7:032x}-{9:016x}-01"),)
        _ = [response async for response in rig.stub.Generate(message, metadata=metadata)]
        await rig.quiet()
    named = {span.name for span in exporter.get_finished_spans()}
    assert named & {"prefill", "speculation.step"} == names
    assert "text_completion fake" in named
    assert bool(verify.openings[0].traceparent) == (detail == "all")


async def test_one_span_per_step(exporter: InMemorySpanExporter) -> None:
    """A sampled request has a root span below the caller's, a prefill, and a span per verdict."""
    verify = FakeVerify(patience=1.0)
    async with Rig(verify, FakeDraft()) as rig:
        call = rig.stub.Generate(
            generation_pb2.GenerateRequest(
                token_ids=tokens_pb2.TokenIds(ids=PROMPT),
                sampling=tokens_pb2.SamplingParams(max_tokens=20),
            ),
            metadata=(("traceparent", f"00-{7:032x}-{9:016x}-01"),),
        )
        answer = [response async for response in call]
        await rig.quiet()
        steps = answer[-1].complete.speculation.steps
    found = {span.name: span for span in exporter.get_finished_spans()}
    root, prefill = found["text_completion fake"], found["prefill"]
    assert root.context.trace_id == 7
    assert root.parent.span_id == 9
    assert root.attributes["gen_ai.usage.output_tokens"] == 20
    assert list(root.attributes["gen_ai.response.finish_reasons"]) == ["length"]
    assert prefill.parent.span_id == root.context.span_id
    traceparent = verify.openings[0].traceparent
    spans_of_steps = [span for span in exporter.get_finished_spans() if span.name == "speculation.step"]
    assert len(spans_of_steps) == steps
    for number, span in enumerate(spans_of_steps, 1):
        assert span.context.span_id == spans.step_span_id(traceparent, number)
        assert span.parent.span_id == root.context.span_id
        assert span.attributes["outrider.step.forward_us"] == 100
        assert span.attributes["outrider.step.wire_us"] >= 0
        assert span.start_time <= span.end_time
    accepted = sum(span.attributes["outrider.step.accepted"] for span in spans_of_steps)
    assert accepted == answer[-1].complete.speculation.accepted


async def test_failed_request_has_an_error_span(exporter: InMemorySpanExporter) -> None:
    """The root span of a request that failed or was cancelled says so."""
    async with Rig(verify := FakeVerify()) as rig:
        verify.hold.clear()
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        asking.cancel()
        await rig.quiet()
        verify.hold.set()
    (root,) = [span for span in exporter.get_finished_spans() if span.name.startswith("text_completion")]
    assert root.status.description == "CANCELLED"


async def test_continuations_have_spans_of_their_own(exporter: InMemorySpanExporter) -> None:
    """With n = 2 the second continuation's steps hang below its own span, so that step ids never meet."""
    async with Rig(verify := FakeVerify()) as rig:
        await rig.generate(n=2, temperature=1.0, max_tokens=5)
    first, second = (opening.traceparent for opening in verify.openings)
    assert first != second
    ids = [span.context.span_id for span in exporter.get_finished_spans()]
    assert len(ids) == len(set(ids)) == 1 + 1 + 2 * (5 + 1 + 1)  # steps, prefill, stream of each
