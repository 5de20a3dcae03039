"""Validation: every field of a request, wrong in every way, and what a right one becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.request.resolver import IncomingRequest, ResolvedRequest, Resolver
from orchestrator.request.ticket import Ticket
from orchestrator.request.wire import incoming_from_pb
from orchestrator.text.conversation import ChatMessage, Conversation
from orchestrator.text.jobs import ChatPrompt
from orchestrator.text.template import ChatTemplate
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import ContextTooLong, InvalidRequest, UnknownModel
from outrider.protocol.messages import FinishReason, KvHandle, Mode, ModelInfo, SamplingParams
from outrider.v1 import generation_pb2, tokens_pb2
from tests.unit.orchestrator.text.test_text_stream import byte_level

SERVED = ModelInfo("target", "hash", vocabulary_size=300, context_length=20, eos_token_ids=(99,))
HANDLE = KvHandle("owner", "incarnation", "id", 3, b"\x01\x02", 12345)


def resolver(**changes: Any) -> Resolver:
    """A resolver with a byte-level tokenizer; the next seed is 77."""
    parts: dict[str, Any] = {"tokenizer": byte_level(), "default_max_tokens": 0} | changes
    return Resolver(served=SERVED, draw_seed=lambda: 77, **parts)


def resolve(pb: generation_pb2.GenerateRequest, **changes: Any) -> ResolvedRequest:
    """From the wire to a request that can be run."""
    return resolved(incoming_from_pb(pb), resolver(**changes))


def resolved(incoming: IncomingRequest, by: Resolver) -> ResolvedRequest:
    """Checked, tokenized, completed."""
    by.check(incoming)
    prompt, prediction = (
        given if isinstance(given, tuple | None) else given.tokens(by.tokenizer)
        for given in (incoming.prompt, incoming.prediction)
    )
    return by.resolve(incoming, "id", prompt, prediction)


def ask(**fields: Any) -> generation_pb2.GenerateRequest:
    """A request for three tokens; `sampling` and `speculation` are dicts."""
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["token_ids"] = [1, 2, 3]
    if "token_ids" in fields:
        fields["token_ids"] = tokens_pb2.TokenIds(ids=fields["token_ids"])
    if "sampling" in fields:
        fields["sampling"] = tokens_pb2.SamplingParams(**fields["sampling"])
    if "speculation" in fields:
        fields["speculation"] = generation_pb2.SpeculationParams(**fields["speculation"])
    return generation_pb2.GenerateRequest(**fields)


HI = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
NAN, INF = float("nan"), float("inf")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids.ids"),
    ({"token_ids": [1, 300]}, "token_ids.ids[1]"),
    ({"token_ids": [2**32 - 1]}, "token_ids.ids[0]"),
    ({"text": ""}, "text"),
    ({"chat": generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user")])}, "chat"),
    ({"resume_token_ids": [300]}, "resume_token_ids[0]"),
    ({"resume_token_ids": [1] * 5, "sampling": {"max_tokens": 4}}, "resume_token_ids"),
    ({"resume_token_ids": [1], "sampling": {"n": 2}}, "resume_token_ids"),
    ({"resume_token_ids": [1], "sampling": {"temperature": 1.0}}, "sampling.seed"),
    ({"session": b"junk"}, "session"),
    ({"session": b"outrider1:[1,2]"}, "session"),
    ({"session": b"outrider1:" + b"[" * 4000}, "session"),
    ({"task": "x" * 65}, "task"),
    ({"task": "a\0"}, "task"),
    ({"task": "\x1b[2J"}, "task"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"speculation": {"mode": 7}}, "speculation.mode"),
    ({"speculation": {"max_nodes": 0}}, "speculation.max_nodes"),
    ({"speculation": {"max_nodes": 257}}, "speculation.max_nodes"),
    ({"speculation": {"max_depth": 0}}, "speculation.max_depth"),
    ({"speculation": {"max_depth": 65}}, "speculation.max_depth"),
    (
        {"speculation": {"prediction": {"token_ids": {"ids": [1, 300]}}}},
        "speculation.prediction.token_ids.ids[1]",
    ),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
    ({"sampling": {"temperature": INF}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.1}}, "sampling.top_p"),
    ({"sampling": {"top_k": 2**32 - 1}}, "sampling.top_k"),
    ({"sampling": {"min_p": -0.5}}, "sampling.min_p"),
    ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": NAN}}, "sampling.frequency_penalty"),
    ({"sampling": {"logit_bias": {5: 101.0}}}, "sampling.logit_bias[5]"),
    ({"sampling": {"logit_bias": {300: 1.0}}}, "sampling.logit_bias[300]"),
    ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ({"sampling": {"min_tokens": 5, "max_tokens": 4}}, "sampling.min_tokens"),
    ({"sampling": {"min_tokens": 18}}, "sampling.min_tokens"),
    ({"sampling": {"stop": [""]}}, "sampling.stop[0]"),
    ({"sampling": {"stop": ["x"] * 17}}, "sampling.stop"),
    ({"sampling": {"stop_token_ids": [300]}}, "sampling.stop_token_ids[0]"),
    ({"sampling": {"logprobs": 21}}, "sampling.logprobs"),
    ({"sampling": {"n": 0}}, "sampling.n"),
    ({"sampling": {"n": 17}}, "sampling.n"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=[f"{named} {n}" for n, (_, named) in enumerate(BAD)])
def test_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    """Every wrong field is refused with its name."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(ask(**fields))
    assert caught.value.field == named


def test_prompt_must_be_given() -> None:
    """A request without any prompt is refused."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(generation_pb2.GenerateRequest())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "named"), [({"text": "x"}, "text"), ({"sampling": {"stop": ["x"]}}, "sampling.stop")]
)
def test_text_needs_a_tokenizer(fields: dict[str, Any], named: str) -> None:
    """Without a tokenizer, text prompts and stop strings are refused; token ids are not."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(ask(**fields), tokenizer=None)
    assert caught.value.field == named
    assert resolve(ask(), tokenizer=None).prompt == (1, 2, 3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "ab"}, "text"),
        ({"chat": HI}, "chat.messages"),
        ({"speculation": {"prediction": {"text": "ab"}}}, "speculation.prediction"),
    ],
)
def test_a_tokenizer_may_have_more_tokens_than_the_model(fields: dict[str, Any], named: str) -> None:
    """A text with such tokens is refused, and the sentence names the field with the text."""
    parts = byte_level().files._replace(chat_template="{{ messages[0].content }}")
    small = replace(resolver(tokenizer=TextTokenizer(*parts)), served=replace(SERVED, vocabulary_size=60))
    with pytest.raises(InvalidRequest, match=r"token \d+ of it, and the model has only 60") as caught:
        resolved(incoming_from_pb(ask(**fields)), small)
    assert caught.value.field == named


def test_a_prediction_is_token_ids_in_the_end() -> None:
    """A text is tokenized without what is put around a prompt, and needs a tokenizer; ids do not."""
    text, ids = {"prediction": {"text": "ab"}}, {"prediction": {"token_ids": {"ids": [5, 6]}}}
    expected = byte_level().encode("ab", special_tokens=False)
    assert resolve(ask(speculation=text)).prediction == expected
    assert resolve(ask(speculation=ids), tokenizer=None).prediction == (5, 6)
    with pytest.raises(InvalidRequest) as caught:
        resolve(ask(speculation=text), tokenizer=None)
    assert caught.value.field == "speculation.prediction"
    assert resolve(ask()).prediction == ()


def test_another_model_is_not_found() -> None:
    """The name of the model may be left out or must be the one that is served."""
    with pytest.raises(UnknownModel):
        resolve(ask(model="other"))
    assert resolve(ask(model="target")) == resolve(ask())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": [1] * 20}, "token_ids.ids"),
        ({"text": "x" * 25}, "text"),
        ({"token_ids": [1] * 15, "sampling": {"max_tokens": 6}}, "sampling.max_tokens"),
    ],
)
def test_too_much_for_the_context(fields: dict[str, Any], named: str) -> None:
    """Prompt and max_tokens together must fit the context."""
    with pytest.raises(ContextTooLong) as caught:
        resolve(ask(**fields))
    assert caught.value.field == named


def test_max_tokens_reaches_to_the_context_unless_told_otherwise() -> None:
    """Absent, max_tokens is the room left, or the configured default if that is less."""
    assert resolve(ask()).sampling.max_tokens == 17
    assert resolve(ask(), default_max_tokens=5).sampling.max_tokens == 5
    assert resolve(ask(), default_max_tokens=50).sampling.max_tokens == 17
    assert resolve(ask(sampling={"max_tokens": 17})).sampling.max_tokens == 17


def test_seed_is_drawn_for_sampled_requests_only() -> None:
    """Greedy requests have seed 0; sampled ones their own, given (0 too) or drawn."""
    assert resolve(ask(sampling={"seed": 5})).seed_of(1) == 0
    assert resolve(ask(sampling={"temperature": 1.0})).seed_of(0) == 77
    assert resolve(ask(sampling={"temperature": 1.0, "seed": 0})).seed_of(0) == 0
    assert resolve(ask(sampling={"temperature": 1.0, "seed": 2**64 - 1})).seed_of(2) == 1


def test_modes_have_a_default() -> None:
    """An unspecified mode is AUTO."""
    assert resolve(ask()).mode is Mode.AUTO
    assert resolve(ask(speculation={"mode": 3})).mode is Mode.OFF


def test_stop_strings_stay_here() -> None:
    """Replicas get one continuation's parameters, without stop strings."""
    sampling = resolve(ask(sampling={"stop": ["x"], "n": 3, "temperature": 1.0})).sampling_with(9)
    assert (sampling.stop, sampling.n, sampling.seed) == ((), 1, 9)


@pytest.mark.parametrize(
    ("generated", "sampling", "reason"),
    [
        ((), {}, FinishReason.NONE),
        ((1,), {}, FinishReason.NONE),
        ((1, 99), {}, FinishReason.STOP),
        ((1, 99), {"ignore_eos": True}, FinishReason.NONE),
        ((1, 99), {"min_tokens": 2}, FinishReason.NONE),
        ((1, 5), {"stop_token_ids": (5,)}, FinishReason.STOP),
        ((1, 2), {"max_tokens": 2}, FinishReason.LENGTH),
    ],
)
def test_finished_by(generated: tuple[int, ...], sampling: dict[str, Any], reason: FinishReason) -> None:
    """Resumed tokens are judged by the verify service's rules."""
    request = replace(resolve(ask()), sampling=SamplingParams(**({"max_tokens": 9} | sampling)))
    assert request.finished_by(generated) is reason


def test_ticket_survives_the_wire() -> None:
    """A session comes back as it was issued."""
    ticket = Ticket.issue("host:1", HANDLE, [1, 2, 3, 4])
    assert resolve(ask(session=ticket.serialize())).ticket == ticket


def test_ticket_covers_prompts_that_go_on() -> None:
    """Only a longer prompt with the very same beginning continues a session."""
    ticket = Ticket.issue("host:1", HANDLE, [1, 2, 3, 4])
    assert ticket.covers((1, 2, 3, 9))
    assert not ticket.covers((1, 2, 3))
    assert not ticket.covers((1, 2, 4, 9))


@pytest.mark.parametrize("length", [-1, 2**32, 2**70, True, "3", None, 1.5])
def test_forged_ticket_is_malformed(length: object) -> None:
    """A ticket with an impossible length is refused, not used."""
    data = Ticket.issue("host:1", HANDLE, [1, 2, 3]).serialize()
    forged = data.replace(b",3,", b"," + repr(length).replace("'", '"').lower().encode() + b",")
    assert forged != data
    with pytest.raises(InvalidRequest) as caught:
        Ticket.parse(forged)
    assert caught.value.field == "session"


@pytest.mark.parametrize("field", [b"host:1", b"replica", b"incarnation", b"id"])
def test_ticket_with_half_a_character_is_malformed(field: bytes) -> None:
    """It could not be sent on."""
    handle = KvHandle("replica", "incarnation", "id", 3, b"digest", 0)
    data = Ticket.issue("host:1", handle, [1, 2, 3]).serialize()
    forged = data.replace(b'"' + field + b'"', b'"\\ud800"')
    assert forged != data
    with pytest.raises(InvalidRequest) as caught:
        Ticket.parse(forged)
    assert caught.value.field == "session"


def test_chat_without_messages_is_refused() -> None:
    """A conversation must have messages."""
    template = byte_level()
    template._template = ChatTemplate.parse("", {})
    asked = IncomingRequest(prompt=ChatPrompt(Conversation(messages=())), sampling=SamplingParams())
    with pytest.raises(InvalidRequest) as caught:
        resolved(asked, resolver(tokenizer=template))
    assert caught.value.field == "chat.messages"
    nameless = Conversation(messages=(ChatMessage("", "x"),))
    with pytest.raises(InvalidRequest) as caught:
        resolved(replace(asked, prompt=ChatPrompt(nameless)), resolver(tokenizer=template))
    assert caught.value.field == "chat.messages[0].role"
