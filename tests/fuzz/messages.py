"""Hostile messages: well-formed ones with values that nobody expects, good ones with a few fields changed,
and bytes that are no message at all. Made from the descriptors, so that a new field is fuzzed from its first
day.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Kind = FieldDescriptor
RANGES = {
    Kind.TYPE_INT32: (-(2**31), 2**31 - 1),
    Kind.TYPE_SINT32: (-(2**31), 2**31 - 1),
    Kind.TYPE_UINT32: (0, 2**32 - 1),
    Kind.TYPE_INT64: (-(2**63), 2**63 - 1),
    Kind.TYPE_SINT64: (-(2**63), 2**63 - 1),
    Kind.TYPE_UINT64: (0, 2**64 - 1),
    Kind.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
EDGES = sorted(
    {
        sign * (2**power) + offset
        for sign in (1, -1)
        for power in (0, 4, 8, 16, 31, 32, 62, 63, 64)
        for offset in (-1, 0, 1)
    }
)
"""Integers at which something may overflow."""
FLOATS = (
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    1e-45,
    3.4028235e38,
    -3.4028235e38,
    float("inf"),
    float("-inf"),
    float("nan"),
)
TEXTS = (
    "",
    "\0",
    "stop",
    "é😀\u202e",
    "{{ 7 * 7 }}",
    "../../etc/passwd",
    "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    "00-" + "x" * 32 + "-" + "2" * 16 + "-01",
    "-1-1-1-",
    "x" * 5000,
)
LONGEST = 6
"""Entries of a repeated field."""


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of one scalar."""
    if field.type in RANGES:
        low, high = RANGES[field.type]
        edges = [edge for edge in EDGES if low <= edge <= high]
        return st.sampled_from(edges) | st.integers(max(low, -20), 20) | st.integers(low, high)
    if field.type in (Kind.TYPE_FLOAT, Kind.TYPE_DOUBLE):
        return st.sampled_from(FLOATS) | st.floats(width=32)
    if field.type == Kind.TYPE_BOOL:
        return st.booleans()
    if field.type == Kind.TYPE_BYTES:
        return st.binary(max_size=40) | st.sampled_from([b"outrider1:[]", b"\xff" * 5000])
    assert field.type == Kind.TYPE_STRING
    return st.sampled_from(TEXTS) | st.text(max_size=12)


@st.composite
def changed(draw: st.DrawFn, good: Message, most: int = 3) -> Message:
    """A copy of a message with some fields at some depth changed, cleared or added."""
    message = type(good)()
    message.CopyFrom(good)
    fields = list(message.DESCRIPTOR.fields)
    chosen = st.lists(st.sampled_from(fields), min_size=1, max_size=most, unique_by=lambda field: field.name)
    for field in draw(chosen) if fields else ():
        _change(draw, message, field)
    return message


def hostile(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of a kind."""
    return changed(kind(), most=8)


def encoded(good: Message) -> st.SearchStrategy[bytes]:
    """Bytes for the wire: most often a message that is nearly good, sometimes anything."""
    near = changed(good).map(_serialized)
    anything = hostile(type(good)).map(_serialized)
    cut = st.tuples(near, st.integers(0, 30)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(near, near, near, anything, cut, st.binary(max_size=30))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _change(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    if draw(st.integers(0, 7)) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(draw, getattr(message, field.name), field)
    elif field.is_repeated:
        _change_list(draw, getattr(message, field.name), field)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.CopyFrom(draw(changed(inner)))
    else:
        setattr(message, field.name, draw(values(field)))


def _change_map(draw: st.DrawFn, entries: Any, field: FieldDescriptor) -> None:
    parts = field.message_type.fields_by_name
    for _ in range(draw(st.integers(0, LONGEST))):
        entries[draw(values(parts["key"]))] = draw(values(parts["value"]))


def _change_list(draw: st.DrawFn, entries: Any, field: FieldDescriptor) -> None:
    """Replace one entry, append some, repeat them, or begin anew."""
    how = draw(st.sampled_from(("one", "more", "twice", "anew")))
    if how == "twice":
        entries.extend(list(entries))
        return
    if how == "anew":
        del entries[:]
    if field.message_type is not None:
        for _ in range(draw(st.integers(0, 2))):
            entries.add().CopyFrom(draw(hostile(field.message_type._concrete_class)))
    elif how == "one" and len(entries):
        entries[draw(st.integers(0, len(entries) - 1))] = draw(values(field))
    else:
        entries.extend(draw(st.lists(values(field), max_size=LONGEST)))
