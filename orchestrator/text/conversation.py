"""A conversation as its caller sent it. It travels to another process, so its many parts are tuples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

ENTRY_BYTES = 64
"""Bytes that a message, part, call or tool counts in addition to its text: the template runs for each."""
NO_OBJECT = "INVALID_JSON"
"""Member with the text of a call's arguments if they are no JSON object. Anthropic proposes its name."""


class ToolCall(NamedTuple):
    """A call that an assistant's message made; `arguments` are a JSON object as text, or what the model wrote
    instead."""

    id: str
    name: str
    arguments: str


class Tool(NamedTuple):
    """A function that the model may call; `parameters` are a JSON schema as text, or empty."""

    name: str
    description: str = ""
    parameters: str = ""


class ChatMessage(NamedTuple):
    """One message. `content` is a text, or parts of text."""

    role: str
    content: str | tuple[str, ...] = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or the texts of the parts."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def parts(self) -> int:
        """Number of parts of the content; 0 for a plain text."""
        return 0 if isinstance(self.content, str) else len(self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, oldest first, and the other inputs of the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: str = ""
    """A JSON object, or empty."""
    generation_prompt: bool = True
    """True when the text ends with the beginning of the answer."""
    continue_final: bool = False
    """True when the text ends within the last message, which the answer continues."""

    @property
    def size(self) -> int:
        """Bytes that the conversation counts in the queue."""
        entries = len(self.messages) + len(self.tools)
        entries += sum(message.parts + len(message.tool_calls) for message in self.messages)
        return ENTRY_BYTES * entries + sum(len(text.encode()) for text in self._texts())

    @property
    def is_plain(self) -> bool:
        """True when it has only texts. JSON can take longer than its size suggests, as it is indented."""
        calls = any(message.tool_calls for message in self.messages)
        return not (self.tools or self.template_kwargs or calls)

    def _texts(self) -> Iterator[str]:
        """All texts in the conversation, except roles, which are short."""
        yield self.template_kwargs
        for tool in self.tools:
            yield from (tool.name, tool.description, tool.parameters)
        for message in self.messages:
            yield from message.texts
            yield from (message.name, message.tool_call_id, message.reasoning)
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments)
