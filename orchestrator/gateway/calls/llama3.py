"""Calls as bare JSON objects, as models in the format of Llama 3 write them.

    start     spaces, and the tag that some models put before their calls
    call      an object, when the text begins with a brace
    after     spaces and semicolons between calls
    plain     anything else: all that follows is text

A text that is JSON looks the same, so that only functions that were offered are called.
"""

from __future__ import annotations

from orchestrator.gateway.calls.call_object import SPACE
from orchestrator.gateway.calls.call_reader import Accepts, CallReader
from orchestrator.gateway.calls.pieces import Piece, Text, joined

TAG = "<|python_tag|>"
BETWEEN = SPACE + ";"


class Llama3Parser:
    """A `Parser`; `accepts` knows the functions that were offered."""

    def __init__(self, accepts: Accepts) -> None:
        self._accepts = accepts
        self._calls = 0
        self._call: CallReader | None = None
        self._plain = False
        self._space = self._tag = ""
        """Held back before a call: spaces and separators, and behind them (the beginning of) the tag."""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return joined([piece for sign in text for piece in self._sign(sign)])

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        if self._call is not None:
            return self._call.finish()
        held = self._space + self._tag
        return [Text(held)] if held and not (self._calls and not self._tag) else []

    def _sign(self, sign: str) -> list[Piece]:
        if self._plain:
            return [Text(sign)]
        if self._call is not None:
            return self._in_call(self._call, sign)
        if TAG.startswith(self._tag + sign):
            self._tag += sign
            return []
        if not self._tag and sign in (BETWEEN if self._calls else SPACE):
            self._space += sign
            return []
        return self._begin(sign)

    def _begin(self, sign: str) -> list[Piece]:
        """What is neither space nor tag: a call, or text from here on."""
        held, tag = self._space + self._tag, self._tag
        if tag == TAG and sign in SPACE:
            self._space, self._tag = held + sign, ""
            return []
        self._space = self._tag = ""
        if sign == "{" and tag in ("", TAG):
            self._call = CallReader(self._calls, self._accepts, held)
            return self._in_call(self._call, sign)
        self._plain = True
        return [Text(held + sign)]

    def _in_call(self, call: CallReader, sign: str) -> list[Piece]:
        pieces = call.push(sign)
        if call.ended:
            self._call = None
            self._calls += call.begun
            self._plain = not call.begun
        return pieces
