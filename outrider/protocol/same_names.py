"""Converts between dataclasses and protobuf messages, field by field where both have the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, with unchanged values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def plain_fields(pb: Message) -> dict[str, Any]:
    """The fields of a message by name, without those that are messages themselves.

    Repeated fields are tuples, absent optional ones None.
    """
    found: dict[str, Any] = {}
    for field in pb.DESCRIPTOR.fields:
        if field.message_type is not None:
            continue
        value = getattr(pb, field.name)
        if field.is_repeated:
            value = tuple(value)
        elif field.has_presence and not pb.HasField(field.name):
            value = None
        found[field.name] = value
    return found
