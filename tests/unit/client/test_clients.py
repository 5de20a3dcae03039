"""Both clients against a fake orchestrator: what is sent, what comes back, what they live through."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing, closing
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import grpc
import pytest

from outrider.client import (
    NEVER,
    AsyncClient,
    Broken,
    Chunk,
    Client,
    Event,
    Message,
    Options,
    Request,
    Result,
    Retries,
    Started,
    Tool,
    ToolCall,
)
from outrider.client.wire import request_to_pb
from outrider.protocol.errors import (
    DeadlineExceeded,
    Flood,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from tests.unit.client.fake_orchestrator import SEED, VERSION, FakeOrchestrator

ROOT = Path(__file__).resolve().parents[3]
UNAVAILABLE, WORDS = grpc.StatusCode.UNAVAILABLE, "one two three"
AT_ONCE = Retries((0.0, 0.0), (0.0, 0.0))


class Blocking:
    """`Client`, asked for everything at once."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.make = lambda: Client(*arguments, **settings)

    def generate(self, *arguments: Any, **options: Any) -> Result:
        """A result."""
        with self.make() as client:
            return client.generate(*arguments, **options)

    def events(self, prompt: Any, most: int = 1000, **options: Any) -> list[Event]:
        """The first events of a stream, which is then closed."""
        with self.make() as client, closing(client.stream(prompt, **options)) as stream:
            return [event for _, event in zip(range(most), stream, strict=False)]

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The answer of a method that has one."""
        with self.make() as client:
            return getattr(client, method)(*arguments, **options)


class Async:
    """`AsyncClient`, likewise."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.make = lambda: AsyncClient(*arguments, **settings)

    def generate(self, *arguments: Any, **options: Any) -> Result:
        """A result."""

        async def run() -> Result:
            async with self.make() as client:
                return await client.generate(*arguments, **options)

        return asyncio.run(run())

    def events(self, prompt: Any, most: int = 1000, **options: Any) -> list[Event]:
        """The first events of a stream, which is then closed."""

        async def run() -> list[Event]:
            found: list[Event] = []
            async with self.make() as client, aclosing(client.stream(prompt, **options)) as stream:
                async for event in stream:
                    found.append(event)
                    if len(found) == most:
                        break
            return found

        return asyncio.run(run())

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The answer of a method that has one."""

        async def run() -> Any:
            async with self.make() as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(run())


Kind = Callable[..., Blocking | Async]


@pytest.fixture(params=[Blocking, Async])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Either client."""
    made: Kind = request.param
    return made


def test_a_text_comes_whole(kind: Kind, fake: FakeOrchestrator) -> None:
    """With its tokens, counts, seed and reason."""
    result = kind(fake.endpoint).generate("count", max_tokens=3)
    assert (result.text, result.token_ids, result.finish_reason) == (WORDS, (11, 12, 13), "stop")
    assert result.usage.prompt_tokens == 3
    assert (result.generations[0].seed, result.generations[0].end.model) == (SEED, "demo")
    assert fake.requests[0].sampling.max_tokens == 3


def test_prompts_of_every_kind(kind: Kind, fake: FakeOrchestrator) -> None:
    """Text, token ids, and conversations as messages or mappings."""
    client = kind(fake.endpoint)
    message = {"role": "user", "content": "hi"}
    for prompt in ("count", [1, 2], [message], [Message("user", "hi")], Request(prompt="count")):
        client.generate(prompt)
    text, ids, mapped, typed, whole = fake.requests
    assert text == whole
    assert list(ids.token_ids.ids) == [1, 2]
    assert mapped == typed
    assert [(one.role, one.content) for one in typed.chat.messages] == [("user", "hi")]


def test_a_stream_begins_before_its_first_text(kind: Kind, fake: FakeOrchestrator) -> None:
    """And may be left early."""
    started, chunk = kind(fake.endpoint).events("count", most=2)
    assert isinstance(started, Started)
    assert (started.seed, started.request_id) == (SEED, "r")
    assert isinstance(chunk, Chunk)
    assert chunk.text == "one "


def test_a_broken_stream_goes_on(kind: Kind, fake: FakeOrchestrator) -> None:
    """With the seed, model, weights and tokens of its beginning; the reader sees one stream."""
    fake.breaks = [(1, UNAVAILABLE), (1, grpc.StatusCode.INTERNAL)]
    told: list[Broken] = []
    client = kind(fake.endpoint, on_broken=told.append, retries=AT_ONCE)
    result = client.generate("count", temperature=1.0, resume_token_ids=[7])
    assert (result.text, result.generations[0].end.resumptions) == (WORDS, 2)
    assert [list(request.resume_token_ids) for request in fake.requests] == [[7], [7, 11], [7, 11, 12]]
    assert [request.sampling.seed for request in fake.requests[1:]] == [SEED, SEED]
    assert {(request.model, request.model_version) for request in fake.requests[1:]} == {("demo", VERSION)}
    assert [(broken.tokens, broken.begun) for broken in told] == [(1, True), (2, True)]


def test_each_of_several_continuations_goes_on(kind: Kind, fake: FakeOrchestrator) -> None:
    """By a request of its own, with its own seed."""
    fake.breaks = [(1, UNAVAILABLE)]
    result = kind(fake.endpoint, retries=AT_ONCE).generate("count", temperature=1.0, n=2)
    assert [generation.text for generation in result.generations] == [WORDS, WORDS]
    first, second = fake.requests[1:]
    assert (first.sampling.n, second.sampling.n) == (1, 1)
    assert (first.sampling.seed, second.sampling.seed) == (SEED, 0)  # the next one, modulo 2**64
    assert list(first.resume_token_ids) == list(second.resume_token_ids) == [11]


def test_events_of_a_resumed_stream_are_those_of_an_unbroken_one(kind: Kind, fake: FakeOrchestrator) -> None:
    """One `Started` and one `Complete` per continuation, under its own index."""
    whole = kind(fake.endpoint).events("count", n=2)
    fake.breaks = [(2, UNAVAILABLE)]
    resumed = kind(fake.endpoint, retries=AT_ONCE).events("count", n=2)

    def by_index(events: list[Event]) -> list[tuple[int, str]]:
        return sorted((event.index, type(event).__name__) for event in events)

    assert by_index(resumed) == by_index(whole)


def test_what_has_not_begun_is_repeated_as_it_was(kind: Kind, fake: FakeOrchestrator) -> None:
    """A refusal that may pass is waited out; without retries it is an error."""
    fake.begins, fake.breaks = False, [(0, UNAVAILABLE)]
    assert kind(fake.endpoint, retries=AT_ONCE).generate("count").text == WORDS
    assert fake.requests[0] == fake.requests[1]
    fake.breaks = [(0, UNAVAILABLE)]
    with pytest.raises(Unavailable):
        kind(fake.endpoint, retries=NEVER).generate("count")


def test_attempts_are_bounded(kind: Kind, fake: FakeOrchestrator) -> None:
    """What brings nothing is given up, with a sentence that says what was lost."""
    fake.breaks = [(1, UNAVAILABLE), *[(0, UNAVAILABLE)] * 9]
    with pytest.raises(Unavailable, match="the stream broke after 1 token and cannot be resumed"):
        kind(fake.endpoint, retries=AT_ONCE).generate("count")
    assert len(fake.requests) == 3


def test_a_pause_beyond_the_deadline_is_not_made(kind: Kind, fake: FakeOrchestrator) -> None:
    """The service says to come again later than the caller waits: it hears so at once."""
    fake.error = Overloaded("the queue is full", retry_after=100.0)
    with pytest.raises(Overloaded, match="the queue is full") as failure:
        kind(fake.endpoint, timeout=5.0).generate("count")
    assert failure.value.retry_after == 100.0
    assert len(fake.requests) == 1


def test_errors_keep_their_kind_and_field(kind: Kind, fake: FakeOrchestrator) -> None:
    """As the service raised them; they are not tried again."""
    for error in (InvalidRequest("sampling.top_p", "must be less"), Unauthenticated("send a token")):
        fake.error = error
        with pytest.raises(type(error), match=str(error)) as failure:
            kind(fake.endpoint).generate("count")
        assert failure.value.field == error.field
    assert len(fake.requests) == 2


def test_a_request_that_turns_out_to_be_wrong_keeps_its_error(kind: Kind, fake: FakeOrchestrator) -> None:
    """A grammar may become too costly in the middle of a text: it is not the stream that broke."""
    fake.breaks = [(1, InvalidRequest("sampling.regex", "is too costly; simplify it"))]
    with pytest.raises(InvalidRequest, match="is too costly") as failure:
        kind(fake.endpoint).generate("count")
    assert failure.value.field == "sampling.regex"
    assert len(fake.requests) == 1


def test_metadata_is_sent(kind: Kind, fake: FakeOrchestrator) -> None:
    """Token, request id and trace; a call's own token counts before the client's."""
    client = kind(fake.endpoint, token="ours")
    client.generate("count", request_id="abc", traceparent="00-1-2-01")
    client.generate("count", token="theirs")
    assert client.ask("model_info").context_length == 64
    first, second, third = fake.metadata
    assert (first["authorization"], first["x-request-id"]) == ("Bearer ours", "abc")
    assert first["traceparent"] == "00-1-2-01"
    assert second["authorization"] == "Bearer theirs"
    assert third["authorization"] == "Bearer ours"


def test_text_becomes_token_ids_and_text_again(kind: Kind, fake: FakeOrchestrator) -> None:
    """A text or a conversation; what is not said is left to the service."""
    client = kind(fake.endpoint)
    tokens = client.ask("tokenize", "ab", add_special_tokens=False)
    assert (tokens.token_ids, tokens.count, tokens.context_length) == ((97, 98), 2, 64)
    message = Message("user", "c")
    assert client.ask("tokenize", [message], add_generation_prompt=False, model="demo").token_ids == (99,)
    assert client.ask("detokenize", tokens.token_ids) == "ab"
    text, chat, ids = fake.requests
    assert text.HasField("add_special_tokens")
    assert not text.add_special_tokens
    assert not chat.HasField("add_special_tokens")
    assert (chat.model, chat.chat.messages[0].role, chat.add_generation_prompt) == ("demo", "user", False)
    assert not ids.keep_special_tokens


def test_models_can_be_listed(kind: Kind, fake: FakeOrchestrator) -> None:
    """By name, with what can be asked of them."""
    (model,) = kind(fake.endpoint, token="ours").ask("models")
    assert (model.name, model.context_length, model.chat_prompts) == ("demo", 64, False)
    assert fake.metadata[0]["authorization"] == "Bearer ours"


def test_the_load_is_told(kind: Kind, fake: FakeOrchestrator) -> None:
    """And what the model recommends for sampling."""
    load = kind(fake.endpoint).ask("load")
    assert (load.running, load.places, load.free_places, load.tokens_per_second) == (2, 8, 6, 12.5)
    info = kind(fake.endpoint).ask("model_info")
    assert info.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_a_conversation_with_tools(kind: Kind, fake: FakeOrchestrator) -> None:
    """As messages of ours, and as the OpenAI API writes them: the same on the wire."""
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    theirs = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    ours = [
        Message("user", ("a", "b")),
        Message("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "3", tool_call_id="c1"),
    ]
    tools = [{"type": "function", "function": function}]
    options: Any = {"chat_template_kwargs": {"quick": True}, "add_generation_prompt": False}
    kind(fake.endpoint).generate(theirs, tools=tools, **options)
    kind(fake.endpoint).generate(ours, tools=[Tool("add", "Adds.", '{"type": "object"}')], **options)
    kind(fake.endpoint).ask("tokenize", theirs, tools=tools, chat_template_kwargs={"quick": True})
    first, second, third = fake.requests
    assert first.chat == second.chat
    assert [part.text for part in first.chat.messages[0].parts] == ["a", "b"]
    assert first.chat.messages[1].tool_calls[0].arguments == '{"a": 1}'
    assert (first.chat.tools[0].name, first.chat.tools[0].parameters) == ("add", '{"type": "object"}')
    assert first.chat.chat_template_kwargs == '{"quick": true}'
    assert first.chat.HasField("add_generation_prompt")
    assert third.chat.tools == first.chat.tools


def test_options_of_a_request_are_sent(kind: Kind, fake: FakeOrchestrator) -> None:
    """Absent ones are absent."""
    options: Any = {"include_stop": True, "keep_special_tokens": False, "default_temperature": 1.0}
    kind(fake.endpoint).generate("x", labels={"team": "a"}, truncate_prompt_tokens=7, **options)
    kind(fake.endpoint).generate("x")
    sent, plain = fake.requests
    assert (dict(sent.labels), sent.truncate_prompt_tokens) == ({"team": "a"}, 7)
    assert (sent.sampling.include_stop, sent.sampling.keep_special_tokens) == (True, False)
    assert sent.sampling.HasField("keep_special_tokens")
    assert sent.sampling.default_temperature == 1.0
    for name in ("include_stop", "keep_special_tokens", "default_temperature", "prompt_logprobs"):
        assert not plain.sampling.HasField(name)


@pytest.mark.parametrize("tokens", [0, 1])
def test_log_probabilities_of_the_prompt_come_once(kind: Kind, fake: FakeOrchestrator, tokens: int) -> None:
    """Whenever the stream breaks: before the first token they come again and are left out."""
    fake.breaks = [(tokens, UNAVAILABLE)]
    result = kind(fake.endpoint, retries=AT_ONCE).generate("x", prompt_logprobs=1)
    (generation,) = result.generations
    assert [entry.token for entry in generation.prompt_logprobs] == [0, 1, 2]
    assert result.text == WORDS
    asked_again = fake.requests[1].sampling.HasField("prompt_logprobs")
    assert asked_again is (tokens == 0)


@pytest.mark.parametrize(
    ("method", "arguments", "options", "field"),
    [
        ("tokenize", [[1, 2]], {}, "prompt"),
        ("tokenize", ["x"], {"add_special_tokens": "no"}, "add_special_tokens"),
        ("tokenize", ["x"], {"timeout": -1.0}, "timeout"),
        ("detokenize", [[-1]], {}, "token_ids"),
        ("detokenize", [[2**32]], {}, "token_ids"),
    ],
)
def test_what_cannot_be_converted_names_its_field(
    kind: Kind, fake: FakeOrchestrator, method: str, arguments: Any, options: dict[str, Any], field: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidRequest) as failure:
        kind(fake.endpoint).ask(method, *arguments, **options)
    assert failure.value.field == field
    assert not fake.requests


def test_a_refusal_to_convert_is_not_tried_again(kind: Kind, fake: FakeOrchestrator) -> None:
    """It comes as the error that the service raised; so does that nobody is there."""
    fake.error = Overloaded("too many wait", retry_after=0.0)
    with pytest.raises(Overloaded, match="too many wait"):
        kind(fake.endpoint).ask("tokenize", "x")
    assert len(fake.requests) == 1
    with pytest.raises(Unavailable, match="cannot reach"):
        kind("127.0.0.1:1").ask("detokenize", [1])


def test_a_prediction_is_a_text_or_token_ids(kind: Kind, fake: FakeOrchestrator) -> None:
    """And absent where none is given."""
    for given in ("abc", (1, 2), ()):
        kind(fake.endpoint).generate("count", prediction=given)
    text, ids, none = (request.speculation for request in fake.requests)
    assert text.prediction.text == "abc"
    assert list(ids.prediction.token_ids.ids) == [1, 2]
    assert not none.HasField("prediction")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prediction": [-1]}, "speculation.prediction.token_ids.ids"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),
        ({"temperature": "warm"}, "sampling.temperature"),
        ({"timeout": 0}, "timeout"),
        ({"token": "né"}, "token"),
    ],
)
def test_what_cannot_be_sent_names_its_field(
    kind: Kind, fake: FakeOrchestrator, options: dict[str, Any], field: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidRequest) as failure:
        kind(fake.endpoint).generate("count", **options)
    assert failure.value.field == field
    assert not fake.requests


def test_nobody_there_is_said(kind: Kind) -> None:
    """With the endpoint that was tried."""
    with pytest.raises(Unavailable, match=r"cannot reach 127\.0\.0\.1:1; is"):
        kind("127.0.0.1:1", retries=NEVER).generate("count")


def test_a_token_above_what_headers_take_is_not_tried_again(kind: Kind, fake: FakeOrchestrator) -> None:
    """The same call would be refused again and again."""
    with pytest.raises(Flood, match="metadata size exceeds"):
        kind(fake.endpoint).generate("count", token="x" * 40_000)


def test_half_a_character_is_named(kind: Kind, fake: FakeOrchestrator) -> None:
    """As what it is, not as a mistake of Python's."""
    with pytest.raises(InvalidRequest, match=r"text: has half a character \(\\ud83d\); send whole"):
        kind(fake.endpoint).generate("count \ud83d")


def test_a_deadline_of_centuries_has_not_passed(kind: Kind, fake: FakeOrchestrator) -> None:
    """gRPC would take it for one that has."""
    assert kind(fake.endpoint, timeout=1e300).generate("count").text == WORDS


def test_the_deadline_is_that_of_the_whole_request(kind: Kind, fake: FakeOrchestrator) -> None:
    """A service that does not answer is given up after it."""
    fake.answers.clear()
    with pytest.raises(DeadlineExceeded, match="answer in time; raise the timeout"):
        kind(fake.endpoint, timeout=0.2).generate("count")
    fake.answers.set()


def test_a_wrong_prompt_is_named() -> None:
    """Neither token ids nor messages."""
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]"):
        Blocking().generate([1, "two"])
    with pytest.raises(InvalidRequest, match="n: is given twice"):
        Blocking().generate(Request(prompt="x"), n=2)


def test_options_are_those_of_a_request() -> None:
    """What can be given by keyword is what a `Request` holds beside its prompt."""
    assert set(get_type_hints(Options)) == {field.name for field in fields(Request)} - {"prompt", "chat"}


def test_the_library_loads_no_model_and_no_service() -> None:
    """Whoever imports it needs neither torch nor transformers, nor any service's packages."""
    program = (
        "import sys, outrider.client\n"
        "kinds = ('torch', 'transformers', 'numpy', 'tokenizers', 'orchestrator', 'draft_service',\n"
        "    'verify_service', 'outrider.engine', 'outrider.rpc.serving', 'outrider.process', 'uvloop')\n"
        "sys.exit(', '.join(kind for kind in kinds if kind in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "field", "sent"),
    [
        ({"json_schema": {"z": 1, "a": [None]}}, "json_schema", '{"z": 1, "a": [null]}'),
        ({"json_schema": '{"type":"x"}'}, "json_schema", '{"type":"x"}'),
        ({"json_object": True}, "json_object", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: x"}, "grammar", "start: x"),
    ],
    ids=str,
)
def test_a_constraint_is_sent(options: Any, field: str, sent: Any) -> None:
    """In its field of the sampling parameters, a schema as text."""
    pb = request_to_pb(Request(prompt="x", **options)).sampling
    assert pb.WhichOneof("constraint") == field
    assert getattr(pb, field) == sent


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a", "choice": ["b"]}, "sampling.choice"),
        ({"choice": "abc"}, "sampling.choice"),
        ({"json_schema": {1: {2}}}, "sampling.json_schema"),
        ({"grammar": 3}, "sampling.grammar"),
    ],
    ids=str,
)
def test_a_wrong_constraint_is_named_before_it_is_sent(options: Any, field: str) -> None:
    """Two of them, a text in place of texts, what JSON cannot say."""
    with pytest.raises(InvalidRequest) as failure:
        request_to_pb(Request(prompt="x", **options))
    assert failure.value.field == field


def test_choices_are_sent_and_none_is_no_constraint() -> None:
    """Each as it is."""
    assert list(request_to_pb(Request(prompt="x", choice=["a", "b"])).sampling.choice.texts) == ["a", "b"]
    nothing = Request(prompt="x", choice=(), json_object=False)
    assert request_to_pb(nothing).sampling.WhichOneof("constraint") is None
