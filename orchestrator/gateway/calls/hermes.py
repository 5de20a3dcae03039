"""Calls between `<tool_call>` and `</tool_call>`, as models in the format of Hermes write them.

    text      ordinary text; spaces and what may be the beginning of a tag are held back
    call      behind the tag, up to the end of the object
    after     up to the closing tag, which may be missing

Spaces around calls are dropped, and so are those at the very end when there was a call.
"""

from __future__ import annotations

from orchestrator.gateway.calls.call_object import SPACE
from orchestrator.gateway.calls.call_reader import CallReader
from orchestrator.gateway.calls.pieces import Piece, Text, joined

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """A `Parser`. The tags say what is a call, so that the model may err in a name and hear of it."""

    def __init__(self) -> None:
        self._calls = 0
        self._call: CallReader | None = None
        self._after = False
        self._space = self._tag = ""
        """Held back: spaces, and behind them the beginning of a tag."""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return joined([piece for sign in text for piece in self._sign(sign)])

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        if self._call is not None:
            return self._call.finish()
        held, silent = self._space + self._tag, self._after or (self._calls and not self._tag)
        return [Text(held)] if held and not silent else []

    def _sign(self, sign: str) -> list[Piece]:
        if self._call is not None:
            return self._in_call(self._call, sign)
        tag = END if self._after else BEGIN
        if tag.startswith(self._tag + sign):
            self._tag += sign
            return self._tagged() if self._tag == tag else []
        if not self._tag and sign in SPACE:
            self._space += sign
            return []
        return self._no_tag(sign)

    def _tagged(self) -> list[Piece]:
        """A tag is complete."""
        if self._after:
            self._after = False
        else:
            self._call = CallReader(self._calls, None, self._space + self._tag)
        self._space = self._tag = ""
        return []

    def _no_tag(self, sign: str) -> list[Piece]:
        """What was held back is no tag; the sign may begin another."""
        held, self._space, self._tag = self._space + self._tag, "", ""
        if self._after:
            self._after = False
            return [piece for each in held + sign for piece in self._sign(each)]
        if held.strip(SPACE):
            return [Text(held), *self._sign(sign)]
        return [Text(held + sign)]

    def _in_call(self, call: CallReader, sign: str) -> list[Piece]:
        pieces = call.push(sign)
        if call.ended:
            self._call = None
            self._after = call.begun
            self._calls += call.begun
        return pieces
