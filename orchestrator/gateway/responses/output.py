"""The items of a response as they grow, and the events that a stream sends about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from orchestrator.gateway.outgoing.chat_shape import OutputReader, ReadOutput
from orchestrator.gateway.outgoing.shapes import content_logprobs
from orchestrator.gateway.outgoing.typed_events import StreamEvent
from outrider.client import Chunk


@dataclass(slots=True)
class _Item:
    """A message, reasoning, or a call of a function."""

    id: str
    index: int
    call: dict[str, str] | None = None
    """Id and name of the call; None for a text."""
    reasoning: bool = False
    """True when the text is reasoning; otherwise it is a message."""
    said: list[str] = field(default_factory=list)
    """Parts of the text or of the call's arguments."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def shown(self, status: str) -> dict[str, Any]:
        """The item as it is now. A text in progress is shown without content."""
        head = {"id": self.id, "status": status}
        if self.call is not None:
            return {**head, "type": "function_call", **self.call, "arguments": "".join(self.said)}
        content = [] if status == "in_progress" else [self.part()]
        if self.reasoning:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    @property
    def kind(self) -> str:
        """The kind of text in the names of events."""
        return "reasoning_text" if self.reasoning else "output_text"

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> StreamEvent:
        """Add text; return the event that says so."""
        self.said.append(text)
        self.logprobs += logprobs
        return self.event(f"{self.kind}.delta", delta=text, **self._logprobs(logprobs))

    def _logprobs(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {} if self.reasoning else {"logprobs": logprobs}

    def part(self) -> dict[str, Any]:
        """The content of a text."""
        text = "".join(self.said)
        if self.reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}

    def event(self, kind: str, **more: Any) -> StreamEvent:
        """An event about the item's text or arguments."""
        content = {"content_index": 0} if self.call is None else {}
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **content, **more}

    def began(self) -> list[StreamEvent]:
        """The events that say that the item has begun."""
        added = {"type": "response.output_item.added", "output_index": self.index}
        found = [added | {"item": self.shown("in_progress")}]
        return found if self.call else [*found, self.event("content_part.added", part=self.part())]

    def ended(self, status: str) -> list[StreamEvent]:
        """The events that say that the item has ended."""
        done = {"type": "response.output_item.done", "output_index": self.index, "item": self.shown(status)}
        text = "".join(self.said)
        if self.call:
            name = self.call["name"]
            return [self.event("function_call_arguments.done", arguments=text, name=name), done]
        ended = self.event(f"{self.kind}.done", text=text, **self._logprobs(self.logprobs))
        return [ended, self.event("content_part.done", part=self.part()), done]


@dataclass(slots=True)
class Output:
    """All items of one response. `read` makes the reader of its text."""

    id: str
    """The request's id; ids of items are made from it."""
    read: ReadOutput
    items: list[dict[str, Any]] = field(default_factory=list)
    """Items that have ended."""
    _item: _Item | None = None
    """The item that grows; None between two items."""
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log probabilities of tokens whose text has not been sent."""
    _reader: OutputReader = field(init=False)

    def begin(self, prompt_end: str) -> None:
        """The text begins after a prompt that ends so."""
        self._reader = self.read(prompt_end)

    def text(self, chunk: Chunk) -> list[StreamEvent]:
        """Take new text of the model; return the events that it leads to."""
        self._logprobs += content_logprobs(chunk.logprobs)
        return self._pieces(self._reader.push(chunk.text))

    def end(self, status: str) -> list[StreamEvent]:
        """The model has ended: return the last events. A response has at least one item."""
        events = self._pieces(self._reader.finish())
        if self._item is None and not self.items:
            events += self._begin(_Item(f"msg_{self.id}_0", 0))
        if self._logprobs and self._writes_message():
            events += self._more_text("")
        return [*events, *self._close(status)]

    def _pieces(self, pieces: Sequence[Piece]) -> list[StreamEvent]:
        return [event for piece in pieces for event in self._piece(piece)]

    def _piece(self, piece: Piece) -> list[StreamEvent]:
        match piece:
            case Text():
                return self._more_text(piece.text) if piece.text else []
            case Reasoning():
                return self._more_reasoning(piece.text)
            case CallBegun():
                return self._begin_call(piece.name)
            case CallArguments():
                return self._more_arguments(piece.text)
            case _:
                assert_never(piece)

    def _begin_call(self, name: str) -> list[StreamEvent]:
        events = self._close("completed")
        index = len(self.items)
        self._logprobs = []  # calls have no field for them
        call = {"call_id": self._reader.new_id(), "name": name}
        return [*events, *self._begin(_Item(f"fc_{self.id}_{index}", index, call))]

    def _more_arguments(self, text: str) -> list[StreamEvent]:
        assert self._item is not None
        self._logprobs = []
        self._item.said.append(text)
        return [self._item.event("function_call_arguments.delta", delta=text)]

    def _more_text(self, text: str) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if not self._writes_message():
            events = self._close("completed")
            events += self._begin(_Item(f"msg_{self.id}_{len(self.items)}", len(self.items)))
        assert self._item is not None
        logprobs, self._logprobs = self._logprobs, []
        return [*events, self._item.more(text, logprobs)]

    def _writes_message(self) -> bool:
        return self._item is not None and self._item.call is None and not self._item.reasoning

    def _more_reasoning(self, text: str) -> list[StreamEvent]:
        """Reasoning comes before everything else."""
        events = [] if self._item else self._begin(_Item(f"rs_{self.id}_0", 0, reasoning=True))
        assert self._item is not None
        self._logprobs = []  # reasoning has no field for them
        return [*events, self._item.more(text, [])]

    def _begin(self, item: _Item) -> list[StreamEvent]:
        self._item = item
        return item.began()

    def _close(self, status: str) -> list[StreamEvent]:
        if self._item is None:
            return []
        item, self._item = self._item, None
        self.items.append(item.shown(status))
        return item.ended(status)
