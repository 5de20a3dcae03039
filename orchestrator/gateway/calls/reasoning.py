"""Separates a model's reasoning from its answer: `<think>` reasoning `</think>` answer.

    start      only spaces so far; they may come before the first tag
    inside     reasoning; spaces, and what may be the beginning of the last tag, are held back
    after      the last tag has come, and only spaces since
    answer     passed on; it may have calls

Spaces around the reasoning are dropped.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from orchestrator.gateway.calls.call_object import SPACE
from orchestrator.gateway.calls.pieces import Piece, Reasoning, Text

FIRST = "<think>"
LAST = "</think>"


def begins_reasoning(prompt_end: str) -> bool:
    """Whether a prompt ends with the first tag."""
    return prompt_end.rstrip(SPACE).endswith(FIRST)


def skips_reasoning(prompt_end: str) -> bool:
    """Whether a prompt ends with the last tag: the template leaves the reasoning out."""
    return prompt_end.rstrip(SPACE).endswith(LAST)


class Parser(Protocol):
    """Reads one output. The result does not depend on how the text is cut into parts."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""

    def finish(self) -> list[Piece]:
        """End the output; return the rest of it."""


class PlainText:
    """Reads output that is all text."""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        return []


class _State(Enum):
    START = auto()
    INSIDE = auto()
    AFTER = auto()
    ANSWER = auto()


class ReasoningParser:
    """Reads reasoning; `answer` reads what follows it."""

    def __init__(self, answer: Parser, prompt_end: str) -> None:
        """`prompt_end` is the end of the prompt, in which the template may have begun the reasoning."""
        self._answer = answer
        self._state = _State.INSIDE if begins_reasoning(prompt_end) else _State.START
        self._held = ""
        """Text that is held back."""
        self._spaces = False
        """True when the spaces at the beginning of `_held` belong to the reasoning: it has begun before."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            before = self._state
            pieces += self._step()
            if self._state is before:
                break
        return pieces

    def finish(self) -> list[Piece]:
        """End the output; return the rest of it."""
        held, self._held = self._held, ""
        match self._state:
            case _State.START:
                return [*self._answer.push(held), *self._answer.finish()]
            case _State.INSIDE:
                return self._reasoning(held)
            case _State.AFTER | _State.ANSWER:
                return self._answer.finish()

    def _step(self) -> list[Piece]:
        """Read what is held, up to the end of the present state."""
        match self._state:
            case _State.START:
                self._start()
                return []
            case _State.INSIDE:
                return self._inside()
            case _State.AFTER:
                self._held = self._held.lstrip(SPACE)
                self._state = _State.ANSWER if self._held else _State.AFTER
                return []
            case _State.ANSWER:
                text, self._held = self._held, ""
                return self._answer.push(text)

    def _start(self) -> None:
        text = self._held.lstrip(SPACE)
        if text.startswith(FIRST):
            self._state, self._held = _State.INSIDE, text.removeprefix(FIRST)
        elif not FIRST.startswith(text):
            self._state = _State.ANSWER

    def _inside(self) -> list[Piece]:
        said, last, rest = self._held.partition(LAST)
        if last:
            self._state, self._held = _State.AFTER, rest
            return self._reasoning(said)
        certain = said[: len(said) - _longest_beginning(said)].rstrip(SPACE)
        self._held = said[len(certain) :]
        return self._reasoning(certain)

    def _reasoning(self, said: str) -> list[Piece]:
        text = said.rstrip(SPACE) if self._spaces else said.strip(SPACE)
        self._spaces = self._spaces or bool(text)
        return [Reasoning(text)] if text else []


def _longest_beginning(text: str) -> int:
    """Length of the longest end of `text` with which the last tag begins."""
    return next((size for size in range(len(LAST) - 1, 0, -1) if text.endswith(LAST[:size])), 0)
