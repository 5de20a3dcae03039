"""Runs one request against an orchestrator and collects what comes back as plain values."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from outrider.channels import error_of, open_channel
from outrider.cli.request import request_fields
from outrider.cli.timeline import Bar
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.messages import FinishReason
from outrider.v1 import generation_pb2, generation_pb2_grpc

LANES = {1: "draft", 2: "wire", 3: "verify"}


@dataclass(slots=True)
class Answer:
    """One continuation, as it grows; the counts come with its end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    speculation: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    model: str = ""
    request_id: str = ""
    seconds: float = 0.0
    timeline: list[Bar] = field(default_factory=list)


async def run_request(
    arguments: argparse.Namespace, show: Callable[[str], None], record_timeline: bool
) -> Answer:
    """Send the request that the flags describe; `show` gets the text as it comes.

    Raises:
        OutriderError: what the orchestrator says, or `Unavailable` when it cannot be reached.
    """
    request = _build(request_fields(arguments, record_timeline))
    metadata = [("authorization", f"Bearer {arguments.token}")] if arguments.token else None
    started = time.perf_counter()
    answer = Answer()
    async with open_channel(
        arguments.endpoint,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    ) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request, timeout=arguments.timeout, metadata=metadata)
        try:
            async for response in call:
                _take(answer, response, show)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, arguments.endpoint) from error
        finally:
            call.cancel()
    answer.seconds = time.perf_counter() - started
    return answer


def _build(fields: dict[str, Any]) -> generation_pb2.GenerateRequest:
    try:
        return generation_pb2.GenerateRequest(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest("request", f"a number is out of the range of its field ({error})") from error


def _take(answer: Answer, response: generation_pb2.GenerateResponse, show: Callable[[str], None]) -> None:
    if response.WhichOneof("event") == "chunk":
        chunk = response.chunk
        answer.text += chunk.text
        answer.token_ids.extend(chunk.token_ids)
        answer.logprobs.extend(_logprob(entry) for entry in chunk.logprobs)
        show(chunk.text)
        return
    complete = response.complete
    answer.finish_reason = FinishReason(complete.finish_reason).name.lower()
    answer.usage = _numbers(complete.usage)
    answer.speculation = _numbers(complete.speculation)
    answer.seed, answer.model, answer.request_id = complete.seed, complete.model, complete.request_id
    answer.timeline = [_bar(event) for event in complete.timeline]


def _logprob(entry: Any) -> dict[str, Any]:
    top = [{"token": other.token, "logprob": other.logprob} for other in entry.top]
    return {"token": entry.token, "logprob": entry.logprob, "top": top}


def _numbers(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _bar(event: generation_pb2.TimelineEvent) -> Bar:
    return Bar(
        lane=LANES.get(event.lane, "wire"),
        name=event.name,
        start_ns=event.start_unix_nano,
        duration_us=event.duration_micros,
        step=event.step,
        nodes=event.nodes,
        accepted=event.accepted,
    )


def _explained(error: grpc.aio.AioRpcError, endpoint: str) -> OutriderError:
    found = error_of(error)
    if type(found) is Unavailable and str(found).startswith("UNAVAILABLE: failed to connect"):
        return Unavailable(f"cannot reach {endpoint}; is `outrider up` or an orchestrator running there?")
    return found
