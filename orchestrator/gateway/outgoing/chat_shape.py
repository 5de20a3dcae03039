"""How `/v1/chat/completions` writes choices, with the calls that are in them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.gateway.calls.call_reader import CallParser
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Text
from orchestrator.gateway.outgoing.shapes import Prompt, content_logprobs
from outrider.client import Chunk, Complete, Generation, TokenLogprob


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Calls:
    """Reads the calls in one choice."""

    parser: CallParser
    parallel: bool = True
    """True when all calls are passed on; otherwise only the first is."""
    new_id: Callable[[], str] = _new_id
    found: bool = False

    def delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The delta of one part of a stream, with one entry for each call that begins or goes on in it."""
        content, calls = "", dict[int, dict[str, Any]]()
        for piece in pieces:
            match piece:
                case Text():
                    content += piece.text
                case CallBegun() if self.keeps(piece.index):
                    self.found = True
                    calls[piece.index] = self._begun(piece)
                case CallArguments() if self.keeps(piece.index):
                    going_on = {"index": piece.index, "function": {"arguments": ""}}
                    calls.setdefault(piece.index, going_on)["function"]["arguments"] += piece.text
        delta = {"content": content} if content else {}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def keeps(self, index: int) -> bool:
        """Whether a call is passed on."""
        return self.parallel or index == 0

    def _begun(self, piece: CallBegun) -> dict[str, Any]:
        function = {"name": piece.name, "arguments": ""}
        return {"index": piece.index, "id": self.new_id(), "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The objects of `/v1/chat/completions`; see `CompletionShape`."""

    top: int | None
    read_calls: Callable[[], Calls] | None = None
    """Makes the reader of calls for each choice; None: the answer is all text."""
    whole: str = "chat.completion"
    part: str = "chat.completion.chunk"
    _calls: dict[int, Calls] = field(default_factory=dict)
    """Readers of calls in a stream, by the index of their choice."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """The first part of a choice."""
        if self.read_calls is not None:
            self._calls[index] = self.read_calls()
        return self._part(index, {"role": "assistant", "content": ""})

    def text(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """The part for new text; None when there is nothing to send yet."""
        calls = self._calls.get(index)
        delta = {"content": chunk.text} if calls is None else calls.delta(calls.parser.push(chunk.text))
        if not delta and not chunk.logprobs:
            return None
        return self._part(index, delta, self._logprobs(chunk.logprobs))

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """The last part of a choice."""
        calls = self._calls.get(index)
        delta = {} if calls is None else calls.delta(calls.parser.finish())
        return self._part(index, delta, None, _reason(complete, calls), complete.stop)

    def choice(self, index: int, generation: Generation, prompt: Prompt) -> dict[str, Any]:
        """A whole choice."""
        calls = None if self.read_calls is None else self.read_calls()
        message: dict[str, Any] = {"role": "assistant", "content": generation.text, "refusal": None}
        if calls is not None:
            message |= _message_with(calls, generation.text)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(generation.logprobs),
            "finish_reason": _reason(generation.end, calls),
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


def _reason(complete: Complete, calls: Calls | None) -> str:
    """Why a choice ended. If the text was cut off, that is the reason even if it has calls."""
    called = calls is not None and calls.found and complete.finish_reason == "stop"
    return "tool_calls" if called else complete.finish_reason


def _message_with(calls: Calls, text: str) -> dict[str, Any]:
    """The message of a whole answer."""
    delta = calls.delta([*calls.parser.push(text), *calls.parser.finish()])
    made = [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", [])]
    content = delta.get("content", "")
    return {"content": content or None, "tool_calls": made} if made else {"content": content}
