"""A plain gRPC client of the services, as anyone could write it from the protos."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2

OFF = generation_pb2.MODE_OFF
SEQUENTIAL = generation_pb2.MODE_SEQUENTIAL
AUTO = generation_pb2.MODE_AUTO

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=1": {"temperature": 1.0},
    "T=1 top-k 40 penalties": {
        "temperature": 1.0,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    "T=1.3 min-p 0.05 bias": {"temperature": 1.3, "min_p": 0.05, "logit_bias": {5: 1.5, 11: -2.0, 17: 3.0}},
}
"""The sampler settings under which every draft must leave the tokens alone."""
FEW = ("greedy", "T=1 top-k 40 penalties")
SAMPLER_SWEEP = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in SAMPLERS]
"""Parameters of tests that have another sweep besides: `test_exactness_demo.py` has all samplers at once."""
CALL_SECONDS = 600.0
"""Ends a call that hangs, before pytest's limit; on a busy machine a step may take more than a second."""


@dataclass(slots=True)
class Generation:
    """One finished continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tokens_pb2.TokenLogprob] = field(default_factory=list)
    started: generation_pb2.Started = field(default_factory=generation_pb2.Started)
    complete: generation_pb2.Complete = field(default_factory=generation_pb2.Complete)

    @property
    def statistics(self) -> generation_pb2.SpeculationStats:
        """What speculation did."""
        return self.complete.speculation


def request(
    prompt: Sequence[int] | str,
    *,
    mode: generation_pb2.Mode = AUTO,
    max_tokens: int = 24,
    seed: int = 1,
    ignore_eos: bool = True,
    task: str = "",
    fields: dict[str, Any] | None = None,
    **sampling: Any,
) -> generation_pb2.GenerateRequest:
    """A request; further keywords are sampling parameters, `fields` those of the request itself."""
    text = isinstance(prompt, str)
    prompts: dict[str, Any] = {"text": prompt} if text else {"token_ids": tokens_pb2.TokenIds(ids=prompt)}
    return generation_pb2.GenerateRequest(
        **prompts,
        sampling=tokens_pb2.SamplingParams(
            max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos, **sampling
        ),
        speculation=generation_pb2.SpeculationParams(mode=mode),
        task=task,
        **(fields or {}),
    )


class Client:
    """Calls one orchestrator."""

    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def stream(
        self, message: generation_pb2.GenerateRequest, *, timeout: float = CALL_SECONDS, traceparent: str = ""
    ) -> Any:
        """The open call: iterate for responses, `cancel()` to end it."""
        metadata = (("traceparent", traceparent),) if traceparent else None
        return self.stub.Generate(message, timeout=timeout, metadata=metadata)

    def generate(self, prompt: Sequence[int] | str, *, traceparent: str = "", **options: Any) -> Generation:
        """One continuation, read to its end."""
        return collect(self.stream(request(prompt, **options), traceparent=traceparent))[0]

    def generate_all(
        self, prompts: Sequence[Sequence[int]], at_once: int, **options: Any
    ) -> list[Generation]:
        """One continuation per prompt, `at_once` at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def info(self) -> generation_pb2.GetModelInfoResponse:
        """What is served."""
        return self.stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()


def collect(responses: Iterable[generation_pb2.GenerateResponse]) -> list[Generation]:
    """All continuations of a stream, by index."""
    found: dict[int, Generation] = {}
    for response in responses:
        event = getattr(response, response.WhichOneof("event"))
        generation = found.setdefault(event.index, Generation())
        match event:
            case generation_pb2.Started():
                generation.started = event
            case generation_pb2.Chunk():
                generation.tokens += event.token_ids
                generation.text += event.text
                generation.logprobs += event.logprobs
            case generation_pb2.Complete():
                generation.complete = event
    return [found[index] for index in sorted(found)]


def verify_stub(endpoint: str) -> verify_pb2_grpc.VerifyServiceStub:
    """The verify service at an endpoint."""
    return verify_pb2_grpc.VerifyServiceStub(grpc.insecure_channel(endpoint))


def draft_stub(endpoint: str) -> draft_pb2_grpc.DraftServiceStub:
    """The draft service at an endpoint."""
    return draft_pb2_grpc.DraftServiceStub(grpc.insecure_channel(endpoint))


def verify_info(endpoint: str) -> tokens_pb2.ModelInfo:
    """What a verify replica serves now."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        return stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=10).info


def draft_info(endpoint: str) -> tokens_pb2.ModelInfo:
    """What a draft replica serves now."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        return stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=10).info


def details(error: grpc.RpcError) -> dict[str, Any]:
    """The `google.rpc` details of an error, by message name."""
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for packed in status_pb2.Status.FromString(value).details:
            name = packed.TypeName().rpartition(".")[2]
            message = getattr(error_details_pb2, name)()
            packed.Unpack(message)
            found[name] = message
    return found


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll until a condition holds; fails with `what` when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
