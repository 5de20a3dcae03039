"""The output of a parser: text, and calls in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is part of no call."""

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


Piece: TypeAlias = Text | CallBegun | CallArguments


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same pieces, with neighbours of one kind joined into one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        match last, piece:
            case Text(), Text():
                found[-1] = Text(last.text + piece.text)
            case CallArguments(), CallArguments() if last.index == piece.index:
                found[-1] = CallArguments(last.index, last.text + piece.text)
            case _:
                found.append(piece)
    return found
