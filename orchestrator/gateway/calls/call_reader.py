"""Reads calls: holds text back until it is certain to be a call, then passes the call on as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from orchestrator.gateway.calls.call_object import SPACE, CallState
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Text, joined

Accepts = Callable[[str], bool]
"""Whether a function of this name may be called."""


class CallText(Protocol):
    """Takes the characters of one call: `CallObject` or `CallTags`."""

    state: CallState
    name: str

    @property
    def begun(self) -> bool:
        """Whether it is certain that this is a call."""

    def take(self) -> str:
        """The arguments that have come since the last `take`."""

    def push(self, character: str) -> None:
        """Take the next character."""


class CallReader:
    """Reads call number `index`. `before` is what came before it: text after all if this is not a call.

    When `accepts` is None, any function may be called. `written` reads the call itself.
    """

    def __init__(self, index: int, accepts: Accepts | None, before: str, written: CallText) -> None:
        self.begun = self.ended = False
        """`begun`: the call has been announced. `ended`: nothing more belongs to it."""
        self._index = index
        self._accepts = accepts
        self._held = [before]
        self._written = written
        self._empty = True

    def push(self, character: str) -> list[Piece]:
        """Take the next character; return what is certain now."""
        if not self.begun:
            self._held.append(character)
        if self._empty and character in SPACE:
            return []
        self._empty = False
        self._written.push(character)
        return [*self._announced(), *self._arguments(), *self._end()]

    def finish(self) -> list[Piece]:
        """End the call because the output ends within it; return what was held back if it was not a call."""
        self.ended = True
        return [] if self.begun else [Text("".join(self._held))]

    def _announced(self) -> list[Piece]:
        if self.begun or not self._written.begun:
            return []
        if self._accepts is not None and not self._accepts(self._written.name):
            return []
        self.begun = True
        return [CallBegun(self._index, self._written.name)]

    def _arguments(self) -> list[Piece]:
        more = self._written.take() if self.begun else ""
        return [CallArguments(self._index, more)] if more else []

    def _end(self) -> list[Piece]:
        refused = self._written.begun and not self.begun
        if self._written.state is CallState.OPEN and not refused:
            return []
        return self.finish()


class CallParser:
    """Reads one output. The result does not depend on how the text is cut into parts.

    Each format defines what comes between calls: its `_between` takes the characters there.
    """

    tag: ClassVar[str]
    """The text that announces a call."""

    def __init__(self) -> None:
        self._calls = 0
        self._call: CallReader | None = None
        self._space: list[str] = []
        self._tag = ""
        """Held back: spaces that may separate calls, and after them the beginning of a tag."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        return joined([piece for character in text for piece in self._character(character)])

    def finish(self) -> list[Piece]:
        """End the output; return the rest of it."""
        if self._call is not None:
            return self._call.finish()
        drops = self._drops_rest()
        held = self._release()
        return [Text(held)] if held and not drops else []

    def _release(self) -> str:
        """What was held back between calls. It is held no longer."""
        held = "".join(self._space) + self._tag
        self._space, self._tag = [], ""
        return held

    def _drops_rest(self) -> bool:
        """Whether what is held back at the end is dropped, because it is only spaces after a call."""
        return self._calls > 0 and not self._tag

    def _character(self, character: str) -> list[Piece]:
        return self._between(character) if self._call is None else self._in_call(self._call, character)

    def _between(self, character: str) -> list[Piece]:
        raise NotImplementedError

    def _in_call(self, call: CallReader, character: str) -> list[Piece]:
        pieces = call.push(character)
        if call.ended:
            self._call = None
            self._calls += call.begun
            self._ended(call.begun)
        return pieces

    def _ended(self, begun: bool) -> None:
        """A call has ended, or, when `begun` is false, what looked like a call was not one."""
        raise NotImplementedError
