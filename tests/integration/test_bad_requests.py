"""Every field of the public request, wrong: the status, the field it names, and a service that goes on."""

from __future__ import annotations

import grpc
import pytest

from outrider.v1 import generation_pb2, tokens_pb2
from tests.integration.client import details, request

NAN, INFINITY = float("nan"), float("inf")
CODE = grpc.StatusCode


def sampling(field: str | None = None, /, **values):
    """A request with one sampling parameter wrong, and the field that the error must name."""
    [name] = values
    return pytest.param({"sampling": values}, f"sampling.{field or name}", id=f"{name}={values[name]!r}"[:60])


def fields(named: str, /, **values):
    """A request with other fields wrong, and the field that the error must name."""
    return pytest.param({"fields": values}, named, id=f"{next(iter(values))}-{len(str(values))}")


SPECULATION = generation_pb2.SpeculationParams

INVALID = [
    sampling(temperature=-0.1),
    sampling(temperature=100.5),
    sampling(temperature=NAN),
    sampling(temperature=INFINITY),
    sampling(top_p=0.0),
    sampling(top_p=1.1),
    sampling(top_p=NAN),
    sampling(top_k=2**32 - 1),
    sampling(min_p=-0.5),
    sampling(min_p=1.5),
    sampling(repetition_penalty=0.0),
    sampling(repetition_penalty=-1.0),
    sampling(presence_penalty=2.5),
    sampling(presence_penalty=-2.5),
    sampling(frequency_penalty=3.0),
    sampling(frequency_penalty=NAN),
    sampling("logit_bias", logit_bias={3: 1000.0}),
    sampling("logit_bias", logit_bias={3: NAN}),
    sampling("logit_bias", logit_bias={2**31: 1.0}),
    sampling("logit_bias", logit_bias={4096: 1.0}),
    sampling(max_tokens=0),
    sampling(max_tokens=2**32 - 1),
    sampling(min_tokens=1000),
    sampling("stop", stop=[""]),
    sampling("stop", stop=["x"] * 17),
    sampling("stop", stop=["x" * 2000]),
    sampling("stop_token_ids", stop_token_ids=[4096]),
    sampling("stop_token_ids", stop_token_ids=[1] * 300),
    sampling(logprobs=21),
    sampling(n=0),
    sampling(n=17),
    fields("token_ids", token_ids=tokens_pb2.TokenIds(ids=[])),
    fields("token_ids", token_ids=tokens_pb2.TokenIds(ids=[1, 4096])),
    fields("token_ids", token_ids=tokens_pb2.TokenIds(ids=[2**32 - 1])),
    fields("token_ids", token_ids=tokens_pb2.TokenIds(ids=[5] * 3000)),
    fields("text", text=""),
    fields("text", text="x = 1\n" * 3000),
    fields("chat", chat=generation_pb2.Chat()),
    fields("speculation.mode", speculation=SPECULATION(mode=17)),
    fields("speculation.max_nodes", speculation=SPECULATION(max_nodes=0)),
    fields("speculation.max_nodes", speculation=SPECULATION(max_nodes=257)),
    fields("speculation.max_depth", speculation=SPECULATION(max_depth=0)),
    fields("speculation.max_depth", speculation=SPECULATION(max_depth=65)),
    fields("task", task="t" * 65),
    fields("resume_token_ids", resume_token_ids=[4096]),
    fields("resume_token_ids", resume_token_ids=[5] * 3000),
    fields("session", session=b"no such session"),
    fields("priority", priority=101),
    fields("priority", priority=-101),
]


def send(client, message):
    """The error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stream(message, timeout=20))
    return caught.value


def build(change):
    """A good request with a change applied."""
    sampling_values = {"max_tokens": 4, **change.get("sampling", {})}
    message = request([1, 2, 3], **sampling_values)
    for name, value in change.get("fields", {}).items():
        message.MergeFrom(generation_pb2.GenerateRequest(**{name: value}))
    if "token_ids" in change.get("fields", {}):
        message.token_ids.CopyFrom(change["fields"]["token_ids"])
    return message


@pytest.fixture(scope="module")
def good(demo):
    """What a good request gives, before anything bad was sent."""
    return demo.client("real").generate([1, 2, 3], max_tokens=8).tokens


@pytest.mark.parametrize(("change", "field"), INVALID)
def test_invalid_fields_are_named(demo, good, change, field):
    """INVALID_ARGUMENT with the field in BadRequest and in the message; the next request is served."""
    client = demo.client("real")
    error = send(client, build(change))
    assert error.code() is CODE.INVALID_ARGUMENT, error.details()
    [violation] = details(error)["BadRequest"].field_violations
    assert violation.field.startswith(field)
    assert violation.field in error.details()
    assert details(error)["ErrorInfo"].reason
    assert client.generate([1, 2, 3], max_tokens=8).tokens == good


def test_a_request_without_a_prompt_is_refused(demo):
    """The prompt is not optional."""
    error = send(demo.client("real"), generation_pb2.GenerateRequest())
    assert error.code() is CODE.INVALID_ARGUMENT
    assert details(error)["BadRequest"].field_violations[0].field == "prompt"


def test_an_unknown_model_is_not_found(demo):
    """Another model's name gives NOT_FOUND and the name that is served."""
    error = send(demo.client("real"), request([1, 2, 3], fields={"model": "gpt-9"}))
    assert error.code() is CODE.NOT_FOUND
    assert "gpt-9" in error.details()
    assert "target" in error.details()


def test_bytes_that_are_no_message_are_refused(demo, good):
    """Garbage instead of a message ends that call alone."""
    raw = demo.client("real").channel.unary_stream("/outrider.v1.GenerationService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(raw(b"\xff\xff\xff garbage", timeout=10))
    assert caught.value.code() in (CODE.INTERNAL, CODE.INVALID_ARGUMENT, CODE.UNKNOWN)
    assert demo.client("real").generate([1, 2, 3], max_tokens=8).tokens == good


def test_a_message_above_the_limit_is_refused(demo, good):
    """A request larger than the message limit gives RESOURCE_EXHAUSTED, not a dead service."""
    error = send(demo.client("real"), request("x" * (65 << 20)))
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert demo.client("real").generate([1, 2, 3], max_tokens=8).tokens == good
