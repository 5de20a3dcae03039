"""Calls as bare JSON objects, as models in the format of Llama 3 write them.

    start     spaces, and the tag that some models put before their calls
    call      an object, when the text begins with a brace
    after     spaces and semicolons between calls
    plain     anything else: all that follows is text

A text that is JSON looks the same, so only an object that names an offered function is a call.
"""

from __future__ import annotations

from orchestrator.gateway.calls.call_object import SPACE, CallObject
from orchestrator.gateway.calls.call_reader import Accepts, CallParser, CallReader
from orchestrator.gateway.calls.pieces import Piece, Text

BETWEEN = SPACE + ";"


class Llama3Parser(CallParser):
    """Reads bare objects as calls; `accepts` says which functions were offered."""

    tag = "<|python_tag|>"

    def __init__(self, accepts: Accepts) -> None:
        super().__init__()
        self._accepts = accepts
        self._plain = False

    def _between(self, character: str) -> list[Piece]:
        if self._plain:
            return [Text(character)]
        if self.tag.startswith(self._tag + character):
            self._tag += character
            return []
        if not self._tag and character in (BETWEEN if self._calls else SPACE):
            self._space.append(character)
            return []
        return self._begin(character)

    def _begin(self, character: str) -> list[Piece]:
        """Take a character that is neither space nor tag: a call begins, or all from here on is text."""
        tag = self._tag
        if tag == self.tag and character in SPACE:
            self._space += [tag, character]
            self._tag = ""
            return []
        held = self._release()
        if character == "{" and tag in ("", self.tag):
            self._call = CallReader(self._calls, self._accepts, held, CallObject())
            return self._character(character)
        self._plain = True
        return [Text(held + character)]

    def _ended(self, begun: bool) -> None:
        self._plain = not begun
