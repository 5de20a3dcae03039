"""A model's chat template: Jinja in a sandbox, with the filters and functions that such templates expect.

The rules are those of `transformers`: tools are objects of the type "function", arguments of calls are values
and not text, and a final message is continued where its own text ends.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator.text.conversation import NO_OBJECT, ChatMessage, Conversation, Tool, ToolCall
from outrider.protocol.errors import InvalidRequest
from outrider.telemetry.logs import get_logger

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

logger = get_logger(__name__)
END = "\ue000end of the text\ue000"
"""Mark after the last message, to find where the template wrote it. Its characters are for private use."""
GIVEN = ("messages", "tools", "add_generation_prompt")
"""Variables that are fields of the request and cannot be set as template arguments."""


class ChatTemplate:
    """A parsed template; it gets `special_tokens` as variables too."""

    def __init__(self, template: Template, takes_parts: bool, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._takes_parts = takes_parts
        self._special_tokens = special_tokens

    @classmethod
    def parse(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Parse a template; None when it does not parse: the model is then served without conversations."""
        environment = _environment()
        try:
            takes_parts = _takes_parts(environment, source)
            return cls(environment.from_string(source), takes_parts, special_tokens)
        except Exception as error:  # Jinja's, or of Python's compiler for the code that Jinja makes of it
            logger.warning(
                "the model's chat template does not parse; conversations are refused", error=str(error)
            )
            return None

    def render(self, chat: Conversation) -> str:
        """The text that the model continues.

        Raises:
            InvalidRequest: there is no message, a field is not JSON, or the template refuses it.
        """
        _check(chat)
        messages = [self._message(message) for message in chat.messages]
        if chat.continue_final:
            _mark_end(messages[-1])
        text = self._rendered(chat, messages)
        return _up_to_end(text) if chat.continue_final else text

    def _rendered(self, chat: Conversation, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        tools = [_tool(index, tool) for index, tool in enumerate(chat.tools)]
        variables = {
            "documents": None,
            **self._special_tokens,
            **_kwargs(chat.template_kwargs),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": chat.generation_prompt and not chat.continue_final,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # the model's own code: it may raise anything
            reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequest(
                "chat.messages", f"the model's chat template refuses them: {reason}"
            ) from None

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """A message in the form that templates expect; empty fields are left out."""
        calls = [_call(call) for call in message.tool_calls]
        found = {"role": message.role, "content": self._content(message)}
        given = {"name": message.name, "tool_calls": calls, "tool_call_id": message.tool_call_id}
        given["reasoning_content"] = message.reasoning
        return found | {name: value for name, value in given.items() if value}

    def _content(self, message: ChatMessage) -> Any:
        if isinstance(message.content, str) or not self._takes_parts:
            return "\n".join(message.texts)
        return [{"type": "text", "text": text} for text in message.content]


def _check(chat: Conversation) -> None:
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must not be empty")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "must not be empty")
    if chat.continue_final and not any(chat.messages[-1].texts):
        raise InvalidRequest("chat.continue_final_message", "needs a last message with a text to continue")


def _tool(index: int, tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _object(f"chat.tools[{index}].parameters", tool.parameters)
    return {"type": "function", "function": function}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments or "{}")}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object, which templates expect.

    Clients send back what a model wrote, and that may be none, or have been cut off.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {NO_OBJECT: text}


def _kwargs(text: str) -> dict[str, Any]:
    found = _object("chat.chat_template_kwargs", text or "{}")
    for name in GIVEN:
        if name in found:
            raise InvalidRequest(f"chat.chat_template_kwargs.{name}", "has a field of its own; use that")
    return found


def _object(path: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(path, "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest(path, "must be a JSON object")
    return value


def _mark_end(message: dict[str, Any]) -> None:
    """Put the mark after the text of a message or its last part.

    The space after the mark shows whether the template trims texts.
    """
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{END} "
    else:
        content[-1]["text"] += f"{END} "


def _up_to_end(text: str) -> str:
    """The text before the mark, without the spaces at its end if the template trims texts."""
    before, mark, after = text.rpartition(END)
    if not mark:
        raise InvalidRequest(
            "chat.continue_final_message", "the model's chat template does not show the last message"
        )
    return before if after.startswith(" ") else before.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from orchestrator.text.generation_tag import GenerationTag  # imports jinja2

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _takes_parts(environment: ImmutableSandboxedEnvironment, source: str) -> bool:
    """Whether the template goes through the parts of a message's content: `for part in message.content`."""
    from jinja2 import nodes

    loops = environment.parse(source).find_all(nodes.For)
    return any(_names_content(loop.iter) for loop in loops)


def _names_content(node: Any) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
