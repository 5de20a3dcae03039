"""Reads one call: keeps text back until it certainly is a call, then passes it on as it is written."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.gateway.calls.call_object import SPACE, CallObject, CallState
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Text

Accepts = Callable[[str], bool]
"""Whether a function of this name may be called."""


class CallReader:
    """Call number `index`. `before` is what led to it: it is text after all if this is no call.

    `accepts` None: any function may be called.
    """

    def __init__(self, index: int, accepts: Accepts | None, before: str) -> None:
        self.begun = self.ended = False
        """The call has been announced; nothing more belongs to it."""
        self._index = index
        self._accepts = accepts
        self._held = before
        self._object = CallObject()
        self._empty = True

    def push(self, sign: str) -> list[Piece]:
        """The next sign."""
        if not self.begun:
            self._held += sign
        if self._empty and sign in SPACE:
            return []
        self._empty = False
        self._object.push(sign)
        return [*self._announced(), *self._arguments(), *self._end()]

    def finish(self) -> list[Piece]:
        """The output ends within the call."""
        self.ended = True
        return [] if self.begun else [Text(self._held)]

    def _announced(self) -> list[Piece]:
        if self.begun or not self._object.begun:
            return []
        if self._accepts is not None and not self._accepts(self._object.name):
            return []
        self.begun = True
        return [CallBegun(self._index, self._object.name)]

    def _arguments(self) -> list[Piece]:
        more = self._object.take() if self.begun else ""
        return [CallArguments(self._index, more)] if more else []

    def _end(self) -> list[Piece]:
        refused = self._object.begun and not self.begun
        if self._object.state is CallState.OPEN and not refused:
            return []
        return self.finish()
