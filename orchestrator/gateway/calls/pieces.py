"""The output of a parser: reasoning, text, and calls in parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function begins. `index` counts the calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as the model wrote them: parts of a JSON text."""

    index: int
    text: str


Piece: TypeAlias = Reasoning | Text | CallBegun | CallArguments


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same pieces, with neighbours of one kind joined into one. A whole answer comes one character at
    a time.
    """
    found: list[Piece] = []
    for _, run in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        first, *rest = run
        more = "".join([one.text for one in rest if not isinstance(one, CallBegun)])
        found.append(first if isinstance(first, CallBegun) else replace(first, text=first.text + more))
    return found
