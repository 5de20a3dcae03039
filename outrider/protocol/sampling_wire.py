"""Sampling parameters on the wire; see `outrider.protocol.wire`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from outrider.protocol.constraint import constraint_fields, constraint_from
from outrider.protocol.messages import MAX_ENTRIES, SamplingParams, check_entries
from outrider.protocol.same_names import fields_of
from outrider.v1 import tokens_pb2

_FLOAT32 = struct.Struct("f")
_NAMES = {field.name for field in fields(SamplingParams)}


def sampling_to_pb(params: SamplingParams) -> tokens_pb2.SamplingParams:
    """Sampling parameters for the wire; every field is set, so no side needs the other's defaults."""
    given = fields_of(params)
    constraint = given.pop("constraint")
    return tokens_pb2.SamplingParams(**given, **(constraint_fields(constraint) if constraint else {}))


def sampling_from_pb(
    pb: tokens_pb2.SamplingParams, model_defaults: Mapping[str, float] | None = None
) -> SamplingParams:
    """Sampling parameters from the wire; absent fields take the model's defaults, or else ours.

    A float32 becomes the shortest decimal number that rounds to it, so that a caller's 0.7 is 0.7 here.

    Raises:
        InvalidRequest: a value is out of its range, or a list is too long; long lists are not read.
    """
    for name in MAX_ENTRIES:
        check_entries(name, len(getattr(pb, name)))
    present = {name: value for name, value in present_fields(pb).items() if name in _NAMES}
    given = {"temperature": shortest(pb.default_temperature), **(model_defaults or {}), **present}
    given |= {
        "logit_bias": {token: shortest(bias) for token, bias in pb.logit_bias.items()},
        "stop": tuple(pb.stop),
        "stop_token_ids": tuple(pb.stop_token_ids),
        "constraint": constraint_from(pb),
    }
    return SamplingParams(**given)


def present_fields(pb: tokens_pb2.SamplingParams) -> dict[str, Any]:
    """The parameters that are present, by name: those of a request, or those that a model's files set."""
    return {
        field.name: shortest(value) if isinstance(value, float) else value for field, value in pb.ListFields()
    }


def shortest(value: float) -> float:
    """The decimal number with the fewest digits that rounds to this float32; NaN and infinities unchanged."""
    for digits in range(6, 9):
        candidate = float(f"{value:.{digits}g}")
        if _FLOAT32.unpack(_FLOAT32.pack(candidate))[0] == value:
            return candidate
    return value
