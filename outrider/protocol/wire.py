"""Converts between protobuf messages and the types of `outrider.protocol.messages`.

`<type>_to_pb` and `<type>_from_pb` for each type. Reading checks the shape of a message (columns of equal
length, bounds, finite numbers, known enum values) and raises `InvalidRequest` naming the field. The service
checks whether ids and lengths make sense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar, cast

from outrider.internal.v1 import draft_pb2, session_pb2, verify_pb2
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import (
    MAX_STEP_NODES,
    FinishReason,
    KvHandle,
    Mode,
    ModelInfo,
    OpenDraft,
    Opened,
    OpenVerify,
    Origin,
    PromptFeatures,
    PromptLogprobs,
    StepNodes,
    StepTimes,
    TokenBlock,
    TokenLogprob,
    Verdict,
    VerifyPolicy,
)
from outrider.protocol.same_names import fields_of, plain_fields
from outrider.protocol.sampling_wire import present_fields, sampling_from_pb, sampling_to_pb
from outrider.v1 import tokens_pb2

MAX_BLOCK_NODES = 1024
"""Most nodes of one token block."""
MAX_TRACEPARENT = 64
"""Most characters of a trace context; one of W3C has 55."""

_Enum = TypeVar("_Enum", bound=IntEnum)


def block_to_pb(block: TokenBlock) -> session_pb2.TokenBlock:
    """A token block for the wire."""
    return session_pb2.TokenBlock(**fields_of(block))


def block_from_pb(pb: session_pb2.TokenBlock) -> TokenBlock:
    """A token block from the wire.

    Raises:
        InvalidRequest: columns of unequal length, too many nodes, an acceptance that is no number, or a
            trace context that is too long.
    """
    nodes = len(pb.tokens)
    if nodes > MAX_BLOCK_NODES:
        raise InvalidRequest("propose.tokens", f"must have at most {MAX_BLOCK_NODES} nodes, not {nodes}")
    _same_length("propose.parents", pb.parents, nodes)
    _same_length("propose.acceptances", pb.acceptances, nodes)
    if len(pb.traceparent) > MAX_TRACEPARENT:
        raise InvalidRequest("propose.traceparent", f"must have at most {MAX_TRACEPARENT} characters")
    block = TokenBlock(**plain_fields(pb))
    if not math.isfinite(sum(block.acceptances)):
        raise InvalidRequest("propose.acceptances", "must be finite numbers")
    return block


def verdict_to_pb(verdict: Verdict) -> session_pb2.Verdict:
    """A verdict for the wire."""
    nodes = verdict.nodes
    given = fields_of(verdict) | {
        "logprobs": [logprob_to_pb(logprob) for logprob in verdict.logprobs],
        "times": session_pb2.StepTimes(**fields_of(verdict.times)),
        "nodes": None if nodes is None else session_pb2.StepNodes(**fields_of(nodes)),
    }
    return session_pb2.Verdict(**given)


def verdict_from_pb(pb: session_pb2.Verdict) -> Verdict:
    """A verdict from the wire.

    Raises:
        InvalidRequest: not one log probability per token, an unknown finish reason, or nodes that are too
            many or form no tree.
    """
    if pb.logprobs:
        _same_length("verdict.logprobs", pb.logprobs, len(pb.tokens))
    given = plain_fields(pb) | {
        "logprobs": tuple([logprob_from_pb(logprob) for logprob in pb.logprobs]),
        "times": StepTimes(**plain_fields(pb.times)),
        "finish_reason": _enum("verdict.finish_reason", FinishReason, pb.finish_reason),
        "node_price": _finite("verdict.node_price", pb.node_price),
        "nodes": _nodes_from_pb(pb.nodes) if pb.HasField("nodes") else None,
    }
    return Verdict(**given)


def _nodes_from_pb(pb: session_pb2.StepNodes) -> StepNodes:
    count = len(pb.tokens)
    if count > MAX_STEP_NODES:
        raise InvalidRequest("verdict.nodes", f"must be at most {MAX_STEP_NODES}, not {count}")
    _same_length("verdict.nodes.parents", pb.parents, count)
    _same_length("verdict.nodes.origins", pb.origins, count)
    if any(not -1 <= parent < index for index, parent in enumerate(pb.parents)):
        raise InvalidRequest("verdict.nodes.parents", "must each be -1 or the index of an earlier node")
    origins = tuple(_enum("verdict.nodes.origins", Origin, origin) for origin in pb.origins)
    return StepNodes(tuple(pb.tokens), tuple(pb.parents), origins)


def logprob_to_pb(logprob: TokenLogprob) -> tokens_pb2.TokenLogprob:
    """A token's log probability for the wire."""
    top = [tokens_pb2.TopLogprob(token=token, logprob=value) for token, value in logprob.top]
    return tokens_pb2.TokenLogprob(token=logprob.token, logprob=logprob.logprob, top=top)


def logprob_from_pb(pb: tokens_pb2.TokenLogprob) -> TokenLogprob:
    """A token's log probability from the wire."""
    return TokenLogprob(pb.token, pb.logprob, tuple([(top.token, top.logprob) for top in pb.top]))


def prompt_logprobs_to_pb(found: PromptLogprobs) -> verify_pb2.PromptLogprobs:
    """Log probabilities of a part of the prompt, for the wire."""
    return verify_pb2.PromptLogprobs(
        position=found.position, logprobs=[logprob_to_pb(logprob) for logprob in found.logprobs]
    )


def prompt_logprobs_from_pb(pb: verify_pb2.PromptLogprobs) -> PromptLogprobs:
    """Log probabilities of a part of the prompt, from the wire."""
    return PromptLogprobs(pb.position, tuple([logprob_from_pb(logprob) for logprob in pb.logprobs]))


def prompt_features_to_pb(found: PromptFeatures) -> session_pb2.PromptFeatures:
    """Features of a part of the text, for the wire."""
    return session_pb2.PromptFeatures(position=found.position, rows=found.rows)


def prompt_features_from_pb(pb: session_pb2.PromptFeatures) -> PromptFeatures:
    """Features of a part of the text, from the wire; their reader checks their length."""
    return PromptFeatures(pb.position, pb.rows)


def mode_from_pb(pb: int) -> Mode:
    """The speculation mode; unspecified is AUTO.

    Raises:
        InvalidRequest: the value is unknown.
    """
    return _enum("speculation.mode", Mode, pb or Mode.AUTO)


def kv_handle_to_pb(handle: KvHandle) -> session_pb2.KvHandle:
    """A KV handle for the wire."""
    return session_pb2.KvHandle(**fields_of(handle))


def kv_handle_from_pb(pb: session_pb2.KvHandle) -> KvHandle:
    """A KV handle from the wire."""
    return KvHandle(**plain_fields(pb))


def open_verify_to_pb(opening: OpenVerify) -> verify_pb2.OpenVerify:
    """The first message of a verify session."""
    handle = opening.kv_handle
    given = fields_of(opening) | {
        "sampling": sampling_to_pb(opening.sampling),
        "kv_handle": None if handle is None else kv_handle_to_pb(handle),
    }
    return verify_pb2.OpenVerify(**given)


def open_verify_from_pb(pb: verify_pb2.OpenVerify) -> OpenVerify:
    """The first message of a verify session.

    Raises:
        InvalidRequest: a sampling parameter is out of its range or the policy is unknown.
    """
    given = plain_fields(pb) | {
        "sampling": sampling_from_pb(pb.sampling),
        "kv_handle": kv_handle_from_pb(pb.kv_handle) if pb.HasField("kv_handle") else None,
        "policy": _enum("policy", VerifyPolicy, pb.policy or VerifyPolicy.PIPELINED),
        "first_prompt_logprob": pb.first_prompt_logprob or 1,
        "seconds_per_token": _finite("seconds_per_token", pb.seconds_per_token),
    }
    return OpenVerify(**given)


def open_draft_to_pb(opening: OpenDraft) -> draft_pb2.OpenDraft:
    """The first message of a draft session."""
    given = fields_of(opening) | {"sampling": sampling_to_pb(opening.sampling)}
    return draft_pb2.OpenDraft(**given)


def open_draft_from_pb(pb: draft_pb2.OpenDraft) -> OpenDraft:
    """The first message of a draft session.

    Raises:
        InvalidRequest: a sampling parameter is out of its range.
    """
    return OpenDraft(**plain_fields(pb), sampling=sampling_from_pb(pb.sampling))


def opened_verify_to_pb(opened: Opened) -> verify_pb2.VerifyOpened:
    """A verify replica's admission."""
    return verify_pb2.VerifyOpened(**fields_of(opened))


def opened_draft_to_pb(opened: Opened) -> draft_pb2.DraftOpened:
    """A draft replica's admission."""
    return draft_pb2.DraftOpened(
        replica=opened.replica, incarnation=opened.incarnation, cached_length=opened.cached_length
    )


def opened_from_pb(pb: verify_pb2.VerifyOpened | draft_pb2.DraftOpened) -> Opened:
    """A replica's admission."""
    return Opened(**plain_fields(pb))


def _same_length(field: str, column: Sequence[object], length: int) -> None:
    if len(column) != length:
        raise InvalidRequest(field, f"must have one entry per token: {length}, not {len(column)}")


def _finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(field, f"must be a finite number, not {value}")
    return value


def _enum(field: str, kind: type[_Enum], value: int) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(field, f"{value} is not a known value") from None


def model_info_to_pb(info: ModelInfo) -> tokens_pb2.ModelInfo:
    """What a replica serves, for the wire."""
    defaults = tokens_pb2.SamplingParams(**cast(Any, info.sampling_defaults))
    return tokens_pb2.ModelInfo(**(fields_of(info) | {"sampling_defaults": defaults}))


def model_info_from_pb(pb: tokens_pb2.ModelInfo) -> ModelInfo:
    """What a replica serves, from the wire."""
    return ModelInfo(**plain_fields(pb), sampling_defaults=present_fields(pb.sampling_defaults))
