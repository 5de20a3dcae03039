"""Converts the messages of a stream to the events that the client yields."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.client.results import (
    Chunk,
    Complete,
    Event,
    FinishReason,
    Origin,
    Started,
    Step,
    StepNode,
    TimelineEvent,
    TokenLogprob,
    Usage,
)
from outrider.protocol.same_names import plain_fields
from outrider.v1 import generation_pb2, tokens_pb2

REASONS: Mapping[int, FinishReason] = {1: "stop", 2: "length"}
ORIGINS: Mapping[int, Origin] = {1: "target", 2: "draft", 3: "lookup", 4: "grammar", 5: "prediction"}
LANES = {1: "draft", 2: "wire", 3: "verify"}


def event_from_pb(response: generation_pb2.GenerateResponse) -> Event | None:
    """One event of a stream; None if its kind is unknown to this version."""
    match response.WhichOneof("event"):
        case "chunk":
            return _chunk(response.chunk)
        case "started":
            return Started(**plain_fields(response.started))
        case "complete":
            return _complete(response.complete)
    return None


def _chunk(pb: generation_pb2.Chunk) -> Chunk:
    return Chunk(
        index=pb.index,
        text=pb.text,
        token_ids=tuple(pb.token_ids),
        logprobs=tuple(_logprob(entry) for entry in pb.logprobs),
        prompt_logprobs=tuple(_logprob(entry) for entry in pb.prompt_logprobs),
        origins=tuple(ORIGINS.get(origin, "") for origin in pb.origins),
        step=_step(pb.step) if pb.HasField("step") else None,
    )


def _step(pb: generation_pb2.StepDetail) -> Step:
    given = plain_fields(pb)
    nodes = (plain_fields(node) | {"origin": ORIGINS.get(node.origin, "")} for node in pb.nodes)
    return Step(
        number=given.pop("step"),
        nodes=tuple(StepNode(**node) for node in nodes),
        timeline=tuple(_timeline_event(event) for event in pb.timeline),
        **given,
    )


def _complete(pb: generation_pb2.Complete) -> Complete:
    counts = plain_fields(pb.speculation)
    histogram = counts.pop("accepted_histogram")
    given = plain_fields(pb) | {
        "finish_reason": REASONS.get(pb.finish_reason, ""),
        "usage": Usage(**plain_fields(pb.usage)),
        "speculation": counts,
        "accepted_histogram": histogram,
        "timeline": tuple(_timeline_event(event) for event in pb.timeline),
    }
    return Complete(**given)


def _logprob(pb: tokens_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(TokenLogprob(**plain_fields(other)) for other in pb.top)
    return TokenLogprob(**plain_fields(pb), top=top)


def _timeline_event(pb: generation_pb2.TimelineEvent) -> TimelineEvent:
    return TimelineEvent(
        lane=LANES.get(pb.lane, "wire"),
        name=pb.name,
        start_ns=pb.start_unix_nano,
        duration_us=pb.duration_micros,
        step=pb.step,
        nodes=pb.nodes,
        accepted=pb.accepted,
    )
