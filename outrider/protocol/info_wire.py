"""Converts between protobuf messages and `ModelInfo`."""

from __future__ import annotations

from typing import Any, cast

from outrider.protocol.messages import ModelInfo
from outrider.protocol.same_names import fields_of, plain_fields
from outrider.protocol.sampling_wire import defaults_from_pb
from outrider.v1 import tokens_pb2


def model_info_to_pb(info: ModelInfo) -> tokens_pb2.ModelInfo:
    """What a replica serves, for the wire."""
    defaults = tokens_pb2.SamplingParams(**cast(Any, info.sampling_defaults))
    return tokens_pb2.ModelInfo(**(fields_of(info) | {"sampling_defaults": defaults}))


def model_info_from_pb(pb: tokens_pb2.ModelInfo) -> ModelInfo:
    """What a replica serves, from the wire."""
    return ModelInfo(**plain_fields(pb), sampling_defaults=defaults_from_pb(pb.sampling_defaults))
