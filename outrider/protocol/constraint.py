"""A constraint on the generated text, as the caller wrote it: a schema, a pattern, a choice or a grammar."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outrider.protocol.errors import InvalidRequest

MAX_BYTES = 128 << 10
"""Most bytes of all texts of a constraint together."""
MAX_CHOICES = 1024


class ConstraintKind(StrEnum):
    """Kinds of constraints; the values are names of fields of `SamplingParams` on the wire."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint; `texts` holds the choices, one text, or nothing for JSON_OBJECT.

    Raises:
        InvalidRequest: a text is empty, or there are too many or too long ones; the texts are not parsed.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (not self.texts and self.kind is not ConstraintKind.JSON_OBJECT) or not all(self.texts):
            raise InvalidRequest(self.field, "must not be empty")
        if len(self.texts) > MAX_CHOICES:
            raise InvalidRequest(self.field, f"must have at most {MAX_CHOICES} texts, not {len(self.texts)}")
        if (size := self.size) > MAX_BYTES:
            raise InvalidRequest(self.field, f"must have at most {MAX_BYTES} bytes, not {size}")

    @property
    def field(self) -> str:
        """The name of the request field that holds the constraint."""
        return f"sampling.{self.kind}"

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def digest(self) -> bytes:
        """A hash that is equal only for equal constraints."""
        found = hashlib.sha256(self.kind.encode())
        for text in self.texts:
            data = text.encode()
            found.update(len(data).to_bytes(8, "little") + data)
        return found.digest()


def constraint_fields(constraint: Constraint) -> dict[str, Any]:
    """The field of `SamplingParams` on the wire that holds the constraint, with its value."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"json_object": True}
        case ConstraintKind.CHOICE:
            return {"choice": {"texts": constraint.texts}}
        case kind:
            return {kind.value: constraint.texts[0]}


def constraint_from(pb: Any) -> Constraint | None:
    """The constraint in `SamplingParams` from the wire, or None; too many choices are not read.

    Raises:
        InvalidRequest: see `Constraint`.
    """
    match pb.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT) if pb.json_object else None
        case "choice":
            return Constraint(ConstraintKind.CHOICE, tuple(pb.choice.texts[: MAX_CHOICES + 1]))
        case name:
            return Constraint(ConstraintKind(name), (getattr(pb, name),))
