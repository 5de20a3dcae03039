"""Checks the lengths of a conversation of the public service, and converts it."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.text.conversation import ChatMessage, Conversation, Tool, ToolCall
from outrider.protocol.errors import InvalidRequest
from outrider.v1 import generation_pb2

MAX_MESSAGES = 4096
"""Most messages of a conversation, and most parts and calls of all its messages. A smaller context lowers
this: each message takes at least one position."""
MAX_TOOLS = 512
MAX_ROLE = 64
"""Most characters of a message's role."""
MAX_NAME = 512
"""Most characters of the name of a function or an author, and of a call's id."""


def check_counts(chat: generation_pb2.Chat, positions: int) -> None:
    """Check the number of messages, parts, calls and tools, and the lengths of names and ids.

    Raises:
        InvalidRequest: there are too many, or one is too long.
    """
    limit = min(MAX_MESSAGES, positions)
    _at_most("chat.messages", len(chat.messages), limit)
    _at_most("chat.tools", len(chat.tools), MAX_TOOLS)
    parts = calls = 0
    for index, message in enumerate(chat.messages):
        parts += len(message.parts)
        calls += len(message.tool_calls)
        try:
            _check_message(message, parts, calls, limit)
        except InvalidRequest as error:
            raise InvalidRequest(f"chat.messages[{index}].{error.field}", error.problem) from None
    for index, tool in enumerate(chat.tools):
        _short(f"chat.tools[{index}].name", tool.name, MAX_NAME)


def bytes_of(chat: generation_pb2.Chat, limit: int) -> int:
    """Bytes of all texts that may enter the prompt, or a larger number that is still within `limit`."""
    size: int = chat.ByteSize()
    return size if size <= limit else sum(len(text.encode()) for text in _texts(chat))


def conversation_from_pb(chat: generation_pb2.Chat) -> Conversation:
    """A conversation as it was received.

    Raises:
        InvalidRequest: a message has both a text and parts, or two ways to end it were asked for.
    """
    asked = chat.HasField("add_generation_prompt")
    if chat.continue_final_message and asked and chat.add_generation_prompt:
        raise InvalidRequest("chat.add_generation_prompt", "excludes continue_final_message; set one of them")
    return Conversation(
        messages=tuple(_message(index, message) for index, message in enumerate(chat.messages)),
        tools=tuple(Tool(tool.name, tool.description, tool.parameters) for tool in chat.tools),
        template_kwargs=chat.chat_template_kwargs,
        generation_prompt=chat.add_generation_prompt if asked else not chat.continue_final_message,
        continue_final=chat.continue_final_message,
    )


def _check_message(message: generation_pb2.ChatMessage, parts: int, calls: int, limit: int) -> None:
    """`parts` and `calls` are those of all messages up to this one."""
    _short("role", message.role, MAX_ROLE)
    _at_most("parts", parts, limit)
    _at_most("tool_calls", calls, limit)
    _short("name", message.name, MAX_NAME)
    _short("tool_call_id", message.tool_call_id, MAX_NAME)
    for number, call in enumerate(message.tool_calls):
        _short(f"tool_calls[{number}].id", call.id, MAX_NAME)
        _short(f"tool_calls[{number}].name", call.name, MAX_NAME)


def _texts(chat: generation_pb2.Chat) -> Iterator[str]:
    yield chat.chat_template_kwargs
    for tool in chat.tools:
        yield from (tool.name, tool.description, tool.parameters)
    for message in chat.messages:
        yield from (message.content, message.name, message.tool_call_id, message.reasoning_content)
        yield from (part.text for part in message.parts)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)


def _message(index: int, pb: generation_pb2.ChatMessage) -> ChatMessage:
    content, parts, calls = pb.content, pb.parts, pb.tool_calls
    if content and parts:
        raise InvalidRequest(f"chat.messages[{index}].parts", "came with a content; send one of the two")
    return ChatMessage(
        role=pb.role,
        content=tuple(part.text for part in parts) if parts else content,
        name=pb.name,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls) if calls else (),
        tool_call_id=pb.tool_call_id,
        reasoning=pb.reasoning_content,
    )


def _at_most(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(field, f"must be at most {limit}, not {count}")


def _short(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(field, f"must have at most {limit} characters")
