"""Converts between protobuf messages and `ModelInfo`."""

from __future__ import annotations

from typing import Any, cast

from outrider.protocol.messages import ModelInfo
from outrider.protocol.sampling_wire import shortest
from outrider.v1 import tokens_pb2


def model_info_to_pb(info: ModelInfo) -> tokens_pb2.ModelInfo:
    """What a replica serves, for the wire."""
    return tokens_pb2.ModelInfo(
        model=info.model,
        vocabulary_hash=info.vocabulary_hash,
        vocabulary_size=info.vocabulary_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        replica=info.replica,
        incarnation=info.incarnation,
        max_sessions=info.max_sessions,
        sessions=info.sessions,
        kind=info.kind,
        dtype=info.dtype,
        device=info.device,
        pages=info.pages,
        pages_free=info.pages_free,
        arithmetic=info.arithmetic,
        arithmetic_reason=info.arithmetic_reason,
        sampling_defaults=tokens_pb2.SamplingParams(**cast(Any, info.sampling_defaults)),
        version=info.version,
        shadow=info.shadow,
        feature_layers=info.feature_layers,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        kv_layout=info.kv_layout,
    )


def model_info_from_pb(pb: tokens_pb2.ModelInfo) -> ModelInfo:
    """What a replica serves, from the wire."""
    return ModelInfo(
        model=pb.model,
        vocabulary_hash=pb.vocabulary_hash,
        vocabulary_size=pb.vocabulary_size,
        context_length=pb.context_length,
        eos_token_ids=tuple(pb.eos_token_ids),
        bos_token_id=pb.bos_token_id if pb.HasField("bos_token_id") else None,
        replica=pb.replica,
        incarnation=pb.incarnation,
        max_sessions=pb.max_sessions,
        sessions=pb.sessions,
        kind=pb.kind,
        dtype=pb.dtype,
        device=pb.device,
        pages=pb.pages,
        pages_free=pb.pages_free,
        arithmetic=pb.arithmetic,
        arithmetic_reason=pb.arithmetic_reason,
        sampling_defaults={
            field.name: shortest(value) if isinstance(value, float) else value
            for field, value in pb.sampling_defaults.ListFields()
        },
        version=pb.version,
        shadow=pb.shadow,
        feature_layers=tuple(pb.feature_layers),
        hidden_size=pb.hidden_size,
        num_layers=pb.num_layers,
        kv_layout=pb.kv_layout,
    )
