"""Converts between dataclasses and protobuf messages, field by field where both have the same names."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, with unchanged values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def plain_fields(pb: Message) -> dict[str, Any]:
    """The fields of a message by name, without those that are messages themselves.

    Repeated fields are tuples, absent optional ones None.
    """
    found: dict[str, Any] = {}
    for name, repeated, optional in _plain_names(pb.DESCRIPTOR):
        value = getattr(pb, name)
        if repeated:
            value = tuple(value)
        elif optional and not pb.HasField(name):
            value = None
        found[name] = value
    return found


@cache
def _plain_names(message: Descriptor) -> list[tuple[str, bool, bool]]:
    """The names of these fields, and whether each is repeated or optional: asking costs more than reading."""
    plain = (field for field in message.fields if field.message_type is None)
    return [(field.name, field.is_repeated, field.has_presence) for field in plain]
