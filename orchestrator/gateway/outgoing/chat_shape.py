"""How `/v1/chat/completions` writes choices, with the reasoning and the calls that are in them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from orchestrator.gateway.calls.reasoning import Parser
from orchestrator.gateway.outgoing.shapes import Prompt, content_logprobs
from outrider.client import Chunk, Complete, Generation, TokenLogprob


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class OutputReader:
    """Reads the text of one choice."""

    parser: Parser
    parallel: bool = True
    """True when all calls are passed on; otherwise only the first is."""
    new_id: Callable[[], str] = _new_id
    called: bool = False
    """Whether a call was found."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now and passed on."""
        return self._passed_on(self.parser.push(text))

    def finish(self) -> list[Piece]:
        """End the output; return the rest that is passed on."""
        return self._passed_on(self.parser.finish())

    def delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The delta of one part of a stream, with one entry for each call that begins or goes on in it."""
        content, reasoning, calls = "", "", dict[int, dict[str, Any]]()
        for piece in pieces:
            match piece:
                case Text():
                    content += piece.text
                case Reasoning():
                    reasoning += piece.text
                case CallBegun():
                    self.called = True
                    calls[piece.index] = self._begun(piece)
                case CallArguments():
                    going_on = {"index": piece.index, "function": {"arguments": ""}}
                    calls.setdefault(piece.index, going_on)["function"]["arguments"] += piece.text
        delta = {"reasoning_content": reasoning, "content": content, "tool_calls": list(calls.values())}
        return {name: value for name, value in delta.items() if value}

    def _passed_on(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Without the calls that are not passed on."""
        return [piece for piece in pieces if self.parallel or getattr(piece, "index", 0) == 0]

    def _begun(self, piece: CallBegun) -> dict[str, Any]:
        function = {"name": piece.name, "arguments": ""}
        return {"index": piece.index, "id": self.new_id(), "type": "function", "function": function}


ReadOutput = Callable[[str], OutputReader]
"""Makes a reader from the end of the prompt."""


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The objects of `/v1/chat/completions`; see `CompletionShape`."""

    top: int | None
    read: ReadOutput
    """Makes the reader of each choice."""
    whole = "chat.completion"
    part = "chat.completion.chunk"
    _readers: dict[int, OutputReader] = field(default_factory=dict)
    """Readers of a stream, by the index of their choice."""

    def begin(self, index: int, prompt_end: str) -> dict[str, Any] | None:
        """The first part of a choice; `prompt_end` is the end of its prompt."""
        self._readers[index] = self.read(prompt_end)
        return self._part(index, {"role": "assistant", "content": ""})

    def skip(self, index: int, text: str) -> None:
        """Take in text that the caller has already."""
        self._readers[index].parser.push(text)

    def text(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """The part for new text; None when there is nothing to send yet."""
        reader = self._readers[index]
        delta = reader.delta(reader.push(chunk.text))
        if not delta and not chunk.logprobs:
            return None
        return self._part(index, delta or {"content": ""}, self._logprobs(chunk.logprobs))

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """The last part of a choice."""
        reader = self._readers[index]
        delta = reader.delta(reader.finish())
        return self._part(index, delta, None, _reason(complete, reader), complete.stop)

    def choice(self, index: int, generation: Generation, prompt: Prompt) -> dict[str, Any]:
        """A whole choice."""
        reader = self.read(generation.prompt_end)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_message_with(reader, generation.text)},
            "logprobs": self._logprobs(generation.logprobs),
            "finish_reason": _reason(generation.end, reader),
            "stop_reason": generation.end.stop or None,
        }

    @staticmethod
    def _part(
        index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, stop: str = ""
    ) -> dict[str, Any]:
        part = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return part | ({"stop_reason": stop or None} if reason else {})

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        return {"content": content_logprobs(logprobs), "refusal": None}


def _reason(complete: Complete, reader: OutputReader) -> str:
    """Why a choice ended. If the text was cut off, that is the reason even if it has calls."""
    called = reader.called and complete.finish_reason == "stop"
    return "tool_calls" if called else complete.finish_reason


def _message_with(reader: OutputReader, text: str) -> dict[str, Any]:
    """The content of a whole answer's message, and the calls and reasoning that it has."""
    delta = reader.delta([*reader.push(text), *reader.finish()])
    made = [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", [])]
    content = delta.get("content", "")
    message = {"content": content or None, "tool_calls": made} if made else {"content": content}
    reasoning = delta.get("reasoning_content")
    return message | ({"reasoning_content": reasoning} if reasoning else {})
