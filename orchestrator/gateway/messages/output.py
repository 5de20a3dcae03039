"""The content blocks of an answer as they grow, and the events that a stream sends about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from orchestrator.gateway.outgoing.chat_shape import OutputReader, ReadOutput
from orchestrator.gateway.outgoing.typed_events import StreamEvent
from orchestrator.gateway.strict_json import parsed
from orchestrator.text.conversation import NO_OBJECT

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""What the events of a block's text are called, and their member that has the text."""
SIGNATURE = "unsigned"
"""Signature of all reasoning. Some clients send only signed reasoning back; nobody checks it here."""
SPARE_LEVELS = 100
"""Nesting levels kept free for objects around a call's arguments, of the thousand that Python can write."""


@dataclass(slots=True)
class _Block:
    """A text, reasoning, or a call."""

    index: int
    empty: dict[str, Any]
    """The block as it begins."""
    said: list[str] = field(default_factory=list)
    """Parts of the text or of the call's arguments."""

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.empty["type"])

    def event(self, what: str, **more: Any) -> StreamEvent:
        """An event about the block."""
        return {"type": f"content_block_{what}", "index": self.index, **more}

    def more(self, text: str) -> StreamEvent:
        """Add text; return the event that says so."""
        self.said.append(text)
        kind, member = DELTAS[self.kind]
        return self.event("delta", delta={"type": kind, member: text})

    def ended(self) -> list[StreamEvent]:
        """The events that say that the block has ended."""
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = [self.event("delta", delta=signature)] if self.kind == "thinking" else []
        return [*signed, self.event("stop")]

    def whole(self) -> dict[str, Any]:
        """The block as it is in a whole answer."""
        text = "".join(self.said)
        match self.kind:
            case "tool_use":
                return self.empty | {"input": input_of(text)}
            case "thinking":
                return self.empty | {"thinking": text, "signature": SIGNATURE}
            case _:
                return self.empty | {"text": text}


@dataclass(slots=True)
class Output:
    """All blocks of one answer. `read` makes the reader of its text."""

    read: ReadOutput
    content: list[dict[str, Any]] = field(default_factory=list)
    """Blocks that have ended."""
    called: bool = False
    """Whether one is a call."""
    _block: _Block | None = None
    """The block that grows; None before the first and after the last."""
    _reader: OutputReader = field(init=False)

    def begin(self, prompt_end: str) -> None:
        """The text begins after a prompt that ends so."""
        self._reader = self.read(prompt_end)

    def text(self, text: str) -> list[StreamEvent]:
        """Take new text of the model; return the events that it leads to."""
        return self._pieces(self._reader.push(text))

    def end(self) -> list[StreamEvent]:
        """The model has ended: return the last events. An answer has at least one block."""
        events = self._pieces(self._reader.finish())
        if self._block is None:
            events += self._begin({"type": "text", "text": ""})
        return [*events, *self._close()]

    def _pieces(self, pieces: Sequence[Piece]) -> list[StreamEvent]:
        return [event for piece in pieces for event in self._piece(piece)]

    def _piece(self, piece: Piece) -> list[StreamEvent]:
        match piece:
            case Text():
                return self._more({"type": "text", "text": ""}, piece.text)
            case Reasoning():
                return self._more({"type": "thinking", "thinking": "", "signature": ""}, piece.text)
            case CallBegun():
                self.called = True
                id = self._reader.new_id()
                return self._begin({"type": "tool_use", "id": id, "name": piece.name, "input": {}})
            case CallArguments():
                assert self._block is not None
                return [self._block.more(piece.text)]
            case _:
                assert_never(piece)

    def _more(self, empty: dict[str, Any], text: str) -> list[StreamEvent]:
        """Add text to a block of this type; begin one if another type grows."""
        if not text:
            return []
        goes_on = self._block is not None and self._block.kind == empty["type"]
        events = [] if goes_on else self._begin(empty)
        assert self._block is not None
        return [*events, self._block.more(text)]

    def _begin(self, empty: dict[str, Any]) -> list[StreamEvent]:
        events = self._close()
        self._block = _Block(len(self.content), empty)
        return [*events, self._block.event("start", content_block=empty)]

    def _close(self) -> list[StreamEvent]:
        if self._block is None:
            return []
        block, self._block = self._block, None
        self.content.append(block.whole())
        return block.ended()


def input_of(written: str) -> dict[str, Any]:
    """A call's arguments as an object.

    They may be none, because the model wrote so or was cut off, or be too deep to be written again. The text
    is then the only member of an object.
    """
    spare = "[" * SPARE_LEVELS, "]" * SPARE_LEVELS
    try:
        parsed(f"{spare[0]}{written or '{}'}{spare[1]}")
        found = parsed(written or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {NO_OBJECT: written}
