"""Calls between `<tool_call>` and `</tool_call>`, as models of Hermes and Qwen write them.

    text      ordinary text; spaces and what may be the beginning of a tag are held back
    call      after the tag, up to the end of an object, or of a function's tags
    after     up to the closing tag, which may be missing

Spaces around calls are dropped, and so are those at the very end when there was a call.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.gateway.calls.call_object import SPACE, CallObject
from orchestrator.gateway.calls.call_reader import CallParser, CallReader, CallText
from orchestrator.gateway.calls.pieces import Piece, Text

END = "</tool_call>"


class HermesParser(CallParser):
    """Reads any call between tags as a call, so that a model that errs in a function's name is told so."""

    tag = "<tool_call>"

    def __init__(self, written: Callable[[], CallText] = CallObject) -> None:
        """`written` makes the reader of what is between the tags."""
        super().__init__()
        self._written = written
        self._after = False
        """True when a call has ended and its closing tag has not come yet."""

    def _drops_rest(self) -> bool:
        return self._after or super()._drops_rest()

    def _between(self, character: str) -> list[Piece]:
        tag = END if self._after else self.tag
        if tag.startswith(self._tag + character):
            self._tag += character
            if self._tag == tag:
                self._tagged()
            return []
        if not self._tag and character in SPACE:
            self._space.append(character)
            return []
        return self._no_tag(character)

    def _tagged(self) -> None:
        """A tag is complete."""
        held = self._release()
        if not self._after:
            self._call = CallReader(self._calls, None, held, self._written())
        self._after = False

    def _no_tag(self, character: str) -> list[Piece]:
        """What was held back is not a tag; the character may begin another one."""
        held = self._release()
        if self._after:
            self._after = False
            return [piece for each in held + character for piece in self._character(each)]
        if held.strip(SPACE):
            return [Text(held), *self._character(character)]
        return [Text(held + character)]

    def _ended(self, begun: bool) -> None:
        self._after = begun
