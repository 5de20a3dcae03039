"""Runs one request against an orchestrator and collects what comes back as plain values.

A stream that breaks once it has begun is resumed: by another orchestrator behind the endpoint, or by the same
one when it is back. The tokens are those that the unbroken stream would have brought.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from outrider.channels import error_of, open_channel
from outrider.cli.request import request_fields
from outrider.cli.resume import Resumptions
from outrider.cli.timeline import Bar
from outrider.errors import DeadlineExceeded, InvalidRequest, OutriderError, Unavailable
from outrider.messages import FinishReason
from outrider.v1 import generation_pb2, generation_pb2_grpc

UNREACHABLE = ("UNAVAILABLE: failed to connect", "UNAVAILABLE: errors resolving")
"""How gRPC begins what it says of an endpoint that it has no connection to."""
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
    """Set when the stream has begun."""
    resumptions: int = 0
    """Times that the stream broke and was taken up again; the counts are those of its last part."""
    seconds: float = 0.0
    timeline: list[Bar] = field(default_factory=list)


async def run_request(
    arguments: argparse.Namespace,
    show: Callable[[str], None],
    record_timeline: bool,
    say: Callable[[str], None],
) -> Answer:
    """Send the request that the flags describe; `show` gets the text as it comes, `say` what goes wrong.

    Raises:
        OutriderError: what the orchestrator says, or `Unavailable` when it cannot be reached.
    """
    request = _build(request_fields(arguments, record_timeline))
    started = time.perf_counter()
    answer, resumptions = Answer(), Resumptions()
    while not answer.finish_reason:
        left = arguments.timeout - (time.perf_counter() - started)
        try:
            await _read(arguments, request, left, answer, show)
        except OutriderError as error:
            pause = resumptions.pause(error, len(answer.token_ids)) if answer.request_id else None
            if pause is None or pause >= left:
                raise _final(error, answer) from error
            say(f"{_broken(answer)} ({error}); resuming it" + (f" in {pause:g} s" if pause else ""))
            await asyncio.sleep(pause)
            request = _rest_of(request, answer)
            answer.resumptions = resumptions.count
    answer.seconds = time.perf_counter() - started
    return answer


async def _read(
    arguments: argparse.Namespace,
    request: generation_pb2.GenerateRequest,
    seconds: float,
    answer: Answer,
    show: Callable[[str], None],
) -> None:
    """Add what one stream brings to the answer."""
    metadata = [("authorization", f"Bearer {arguments.token}")] if arguments.token else None
    async with open_channel(
        arguments.endpoint,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    ) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request, timeout=seconds, metadata=metadata)
        try:
            async for response in call:
                _take(answer, response, show)
        except grpc.aio.AioRpcError as error:
            if not answer.finish_reason:
                raise _explained(error, arguments.endpoint) from error
        finally:
            call.cancel()
    if not answer.finish_reason:
        raise Unavailable("the stream ended without an end of the text")


def _build(fields: dict[str, Any]) -> generation_pb2.GenerateRequest:
    try:
        return generation_pb2.GenerateRequest(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest("request", f"a number is out of the range of its field ({error})") from error


def _rest_of(request: generation_pb2.GenerateRequest, answer: Answer) -> generation_pb2.GenerateRequest:
    """The request for what follows the answer, of the same model and with the same noise."""
    rest = generation_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.model = answer.model
    rest.sampling.seed = answer.seed
    rest.resume_token_ids[:] = answer.token_ids
    return rest


def _take(answer: Answer, response: generation_pb2.GenerateResponse, show: Callable[[str], None]) -> None:
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            answer.seed, answer.model, answer.request_id = started.seed, started.model, started.request_id
        case "chunk":
            chunk = response.chunk
            answer.text += chunk.text
            answer.token_ids.extend(chunk.token_ids)
            answer.logprobs.extend(_logprob(entry) for entry in chunk.logprobs)
            show(chunk.text)
        case "complete":
            _end(answer, response.complete)


def _end(answer: Answer, complete: generation_pb2.Complete) -> None:
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


def _broken(answer: Answer) -> str:
    count = len(answer.token_ids)
    return f"the stream broke after {count} token{'' if count == 1 else 's'}"


def _final(error: OutriderError, answer: Answer) -> OutriderError:
    """What the request ends with: once it has begun, that its rest cannot be had."""
    if not answer.request_id or isinstance(error, DeadlineExceeded):
        return error
    return Unavailable(f"{_broken(answer)} and cannot be resumed: {error}")


def _explained(error: grpc.aio.AioRpcError, endpoint: str) -> OutriderError:
    found = error_of(error)
    if type(found) is Unavailable and str(found).startswith(UNREACHABLE):
        return Unavailable(f"cannot reach {endpoint}; is `outrider up` or an orchestrator running there?")
    return found
