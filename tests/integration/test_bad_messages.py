"""The internal services meet callers that break the rules: one status each, and nothing else is touched."""

from __future__ import annotations

import threading

import grpc
import pytest

from outrider.internal.v1 import draft_pb2, session_pb2, verify_pb2
from outrider.v1 import tokens_pb2
from tests.integration.client import (
    SEQUENTIAL,
    details,
    draft_info,
    draft_stub,
    eventually,
    verify_info,
    verify_stub,
)
from tests.integration.hostile_draft import HUGE, block

CODE = grpc.StatusCode
GREEDY = tokens_pb2.SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = [1, 2, 3]


def open_verify(**fields):
    """A good first message of a verify session, with changes."""
    values = {"request_id": "r", "token_ids": PROMPT, "prompt_length": 3, "sampling": GREEDY, **fields}
    return verify_pb2.VerifyRequest(open=verify_pb2.OpenVerify(**values))


def open_draft(**fields):
    """A good first message of a draft session, with changes."""
    values = {"request_id": "r", "token_ids": PROMPT, "prompt_length": 3, "sampling": GREEDY, **fields}
    return draft_pb2.DraftRequest(open=draft_pb2.OpenDraft(**values))


def propose(one):
    """A proposal message."""
    return verify_pb2.VerifyRequest(propose=one)


def stale_handle(**fields):
    """A handle that no replica gave out."""
    values = {"owner": "nobody", "incarnation": "x", "id": "1", "length": 3, "digest": b"d", **fields}
    return session_pb2.KvHandle(**values)


LONG = tokens_pb2.SamplingParams(max_tokens=1500, ignore_eos=True)

BAD_VERIFY = {
    "close before open": (
        [verify_pb2.VerifyRequest(close=verify_pb2.CloseVerify())],
        CODE.INVALID_ARGUMENT,
        "open",
    ),
    "propose before open": ([propose(block(0, [-3], [1]))], CODE.INVALID_ARGUMENT, "open"),
    "empty message": ([verify_pb2.VerifyRequest()], CODE.INVALID_ARGUMENT, "open"),
    "open twice": ([open_verify(sampling=LONG), open_verify()], CODE.INVALID_ARGUMENT, "open"),
    "no tokens": ([open_verify(token_ids=[], prompt_length=0)], CODE.INVALID_ARGUMENT, "token_ids"),
    "token outside": ([open_verify(token_ids=[1, 4096])], CODE.INVALID_ARGUMENT, "token_ids"),
    "too long": ([open_verify(token_ids=[1] * 3000)], CODE.INVALID_ARGUMENT, "token_ids"),
    "prompt longer than tokens": ([open_verify(prompt_length=4)], CODE.INVALID_ARGUMENT, "prompt_length"),
    "bad sampling": (
        [open_verify(sampling=tokens_pb2.SamplingParams(temperature=-1))],
        CODE.INVALID_ARGUMENT,
        "sampling.temperature",
    ),
    "bad policy": ([open_verify(policy=9)], CODE.INVALID_ARGUMENT, "policy"),
    "other vocabulary": (
        [open_verify(vocabulary_hash="another")],
        CODE.FAILED_PRECONDITION,
        "vocabulary_hash",
    ),
    "unknown model": ([open_verify(model="gpt-9")], CODE.NOT_FOUND, "model"),
    "unknown handle": ([open_verify(kv_handle=stale_handle())], CODE.FAILED_PRECONDITION, "kv_handle"),
    "unequal columns": (
        [open_verify(sampling=LONG), propose(block(0, [-3], [1, 2]))],
        CODE.INVALID_ARGUMENT,
        "propose",
    ),
    "huge block": (
        [open_verify(sampling=LONG), propose(block(0, [-3] * HUGE, [1] * HUGE))],
        CODE.INVALID_ARGUMENT,
        "propose",
    ),
    "not a number": (
        [open_verify(sampling=LONG), propose(block(0, [-3], [1], acceptances=[float("nan")]))],
        CODE.INVALID_ARGUMENT,
        "propose",
    ),
}

BAD_DRAFT = {
    "close before open": (
        [draft_pb2.DraftRequest(close=draft_pb2.CloseDraft())],
        CODE.INVALID_ARGUMENT,
        "open",
    ),
    "verdict before open": (
        [draft_pb2.DraftRequest(verdict=session_pb2.Verdict(step=1))],
        CODE.INVALID_ARGUMENT,
        "open",
    ),
    "empty message": ([draft_pb2.DraftRequest()], CODE.INVALID_ARGUMENT, "open"),
    "open twice": ([open_draft(), open_draft()], CODE.INVALID_ARGUMENT, "open"),
    "no tokens": ([open_draft(token_ids=[], prompt_length=0)], CODE.INVALID_ARGUMENT, "token_ids"),
    "token outside": ([open_draft(token_ids=[1, 4096])], CODE.INVALID_ARGUMENT, "token_ids"),
    "prompt longer than tokens": ([open_draft(prompt_length=4)], CODE.INVALID_ARGUMENT, "prompt_length"),
    "bad sampling": (
        [open_draft(sampling=tokens_pb2.SamplingParams(top_p=7))],
        CODE.INVALID_ARGUMENT,
        "sampling.top_p",
    ),
    "other vocabulary": (
        [open_draft(vocabulary_hash="another")],
        CODE.FAILED_PRECONDITION,
        "vocabulary_hash",
    ),
    "verdict from the future": (
        [
            open_draft(),
            draft_pb2.DraftRequest(verdict=session_pb2.Verdict(step=1, base_length=90, tokens=[1])),
        ],
        CODE.INVALID_ARGUMENT,
        "verdict",
    ),
    "verdict outside the vocabulary": (
        [
            open_draft(),
            draft_pb2.DraftRequest(verdict=session_pb2.Verdict(step=1, base_length=3, tokens=[4096])),
        ],
        CODE.INVALID_ARGUMENT,
        "verdict",
    ),
}


def held_open(message, done):
    """A request stream that says one thing and stays open until `done`: closing it ends the session."""
    yield message
    done.wait(30)


def fails_with(call, code, field):
    """The call ends with the code and names the field."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    error = caught.value
    assert error.code() is code, error.details()
    [violation] = details(error)["BadRequest"].field_violations
    assert field in violation.field


@pytest.mark.parametrize(("messages", "code", "field"), BAD_VERIFY.values(), ids=BAD_VERIFY)
def test_bad_verify_streams_end_alone(demo, messages, code, field):
    """A bad message ends its own verify stream; a stream that was open beside it gets its tokens."""
    stub = verify_stub(demo.verify.endpoint)
    done = threading.Event()
    bystander = stub.Verify(held_open(open_verify(), done), timeout=30)
    fails_with(stub.Verify(iter(messages), timeout=30), code, field)
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += next(bystander).verdict.tokens
    done.set()
    assert len(tokens) == 4
    eventually(lambda: verify_info(demo.verify.endpoint).sessions == 0, "no session is left")


@pytest.mark.parametrize(("messages", "code", "field"), BAD_DRAFT.values(), ids=BAD_DRAFT)
def test_bad_draft_streams_end_alone(demo, messages, code, field):
    """A bad message ends its own draft stream, and the replica still drafts."""
    endpoint = demo.draft("real")
    for message in messages:
        if message.WhichOneof("message") == "open" and not message.open.vocabulary_hash:
            message.open.vocabulary_hash = draft_info(endpoint).vocabulary_hash
    fails_with(draft_stub(endpoint).Draft(iter(messages), timeout=30), code, field)
    eventually(lambda: draft_info(endpoint).sessions == 0, "no session is left")
    client = demo.client("real")
    options = {"mode": SEQUENTIAL, "max_tokens": 8}
    eventually(lambda: client.generate(PROMPT, **options).statistics.drafted > 0, "the replica drafts")


@pytest.mark.parametrize("call", ["ReleaseKv", "ForkKv"])
def test_unknown_handles_are_refused(demo, call):
    """Releasing or forking a handle that was never given out says that it is stale."""
    stub = verify_stub(demo.verify.endpoint)
    message = getattr(verify_pb2, f"{call}Request")(kv_handle=stale_handle())
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, call)(message, timeout=10)
    assert caught.value.code() is CODE.FAILED_PRECONDITION
    assert details(caught.value)["ErrorInfo"].reason == "STALE_HANDLE"
