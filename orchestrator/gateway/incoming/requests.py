"""Turns the JSON of an OpenAI request into the requests that the client sends. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.gateway.calls.call_grammar import or_answer
from orchestrator.gateway.calls.formats import CallFormat
from orchestrator.gateway.calls.grammar_faults import fault_in
from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.constraints import constraint_of
from orchestrator.gateway.incoming.fields import CHAT, COMPLETIONS, Sorted, sort_fields
from orchestrator.gateway.incoming.messages import ToolUse, chat_options, messages_of, tool_use
from outrider.client import Message, Request, Tool
from outrider.client.request import MODES
from outrider.protocol.constraint import MAX_BYTES, ConstraintKind
from outrider.protocol.errors import InvalidRequest, no_json

DEFAULTS = {"default_temperature": 1.0}
"""OpenAI's default, for models that have none of their own. The gRPC service's default is 0."""
MAX_TOKENS = 16
"""OpenAI's default for completions; conversations may go on to the end of the context."""
MAX_PROMPTS = 128
"""Most prompts of one HTTP request; each is a request of its own for the orchestrator."""
PROMPT = re.compile(r"^(text|token_ids\.ids|prompt)(?=\[|$)")
"""The orchestrator's names of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One HTTP request."""

    requests: tuple[Request, ...]
    """One request per prompt; the continuations of all prompts are the choices of the answer."""
    chat: bool
    stream: bool = False
    include_usage: bool = False
    """True when a stream ends with the token counts."""
    continuous_usage: bool = False
    """True when each part of a stream has the token counts so far."""
    top_logprobs: int | None = None
    """Number of alternatives to show for each token; None: no log probabilities."""
    echo: bool = False
    """True when the answer begins with the prompt."""
    only_prompt: bool = False
    """True when the answer is the prompt only, without the token that is generated after it."""
    prompt_logprobs: bool = False
    """True when the prompt's log probabilities are shown in a field of their own."""
    tools: ToolUse | None = None
    """Calls to look for in the answer; None: it is all text."""
    constrained_by: str = ""
    """The field that constrains the text; empty when none does."""
    functions: tuple[Tool, ...] = ()
    """Functions whose calls the constraint allows, if the gateway wrote it for them."""
    reasons: bool = False
    """True when the constraint allows reasoning before the answer."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The caller's names of options that the orchestrator calls by others."""

    def named(self, error: InvalidRequest, index: int) -> InvalidRequest:
        """The error of request number `index`, with the name that its field has here."""
        option = (error.field or "").removeprefix("sampling.")
        if option in tuple(ConstraintKind):
            return self._of_constraint(error)
        name = self.names.get(option, error.field or "")
        if len(self.requests) > 1:
            name = PROMPT.sub(f"prompt[{index}]", name)
        return error if name == error.field else type(error)(name, error.problem)

    def _of_constraint(self, error: InvalidRequest) -> InvalidRequest:
        """The error about the caller's constraint, or a function, in place of the grammar made of them."""
        if not (self.functions or self.reasons):
            return type(error)(self.constrained_by, error.problem)
        tool, problem = fault_in(self.requests[0].grammar or "", error.problem, self.functions)
        if tool is None:
            return type(error)(self.constrained_by, problem)
        return type(error)("tools", f"the parameters of {tool.name[:40]!r}: {problem}")

    @property
    def per_prompt(self) -> int:
        """Number of continuations of each prompt."""
        return self.requests[0].count


def completions_from(body: Any) -> HttpRequest:
    """What the body of `/v1/completions` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, COMPLETIONS)
    prompts = _prompts(fields.own.get("prompt"))
    echo = fields.own.get("echo", False)
    options = {**DEFAULTS, "max_tokens": MAX_TOKENS, **_options(fields)}
    only_prompt = echo and options["max_tokens"] == 0
    if only_prompt:  # a prompt is computed for at least one token
        options["max_tokens"] = 1
    if echo and "logprobs" in options:
        options.setdefault("prompt_logprobs", options["logprobs"])
    if fields.own.get("best_of", 1) not in (1, options.get("n", 1)):
        raise wrong("best_of", "is supported as 1 or n only; leave it out")
    request = _http_request(fields, [Request(prompt=prompt, **options) for prompt in prompts], False)
    if echo and options.get("truncate_prompt_tokens"):
        raise wrong("echo", "does not go with truncate_prompt_tokens; leave one of them out")
    return replace(request, echo=_not_streamed("echo", echo, request), only_prompt=only_prompt)


def chat_from(body: Any) -> HttpRequest:
    """What the body of `/v1/chat/completions` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, CHAT)
    own = fields.own
    top = own.get("top_logprobs")
    if top and not own.get("logprobs"):
        raise wrong("top_logprobs", "needs logprobs to be true")
    if own.get("logprobs"):
        fields.options["logprobs"] = top or 0
    return chat_of(fields, messages_of(own.get("messages")))


def chat_of(fields: Sorted, messages: tuple[Message, ...]) -> HttpRequest:
    """A request for the next message of a conversation.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    of_chat = chat_options(fields.own)
    tools = tool_use(fields.own, tuple(of_chat.get("tools", ())))
    if tools is not None and tools.required:
        fields.own.pop("response_format", None)  # clients send it always; it is about other answers
    first = Request(prompt=messages, chat=True, **{**DEFAULTS, **_options(fields), **of_chat})
    request = replace(_http_request(fields, [first], True), tools=tools)
    if request.constrained_by and tools is not None and tools.required:
        raise wrong("tool_choice", f"requires a call, which does not go with {request.constrained_by}")
    return request


def in_call_format(request: HttpRequest, calls: CallFormat | None) -> HttpRequest:
    """The request, with a grammar that allows only calls if a call is required, and calls or an answer in
    JSON if one is asked for.

    `calls` is the format in which the model writes calls.

    Raises:
        Problem: there are tools, and the gateway does not know how the model calls them; or their parameters
            are too large, or nested too deeply, for a grammar.
    """
    tools = request.tools
    if tools is None:
        return request
    if calls is None:
        raise wrong("tools", "needs the gateway's setting tool_call_parser; or send tool_choice 'none'")
    first = request.requests[0]
    answer = _schema_of(first, request.constrained_by) if calls.marked else None
    offered = tools.required or tools.offered
    if not tools.required and answer is None:
        return request
    size = sum(len(tool.parameters) for tool in offered)
    if size > MAX_BYTES:  # refused in any case, but first it would hold up other callers
        raise wrong("tools", f"must have parameters of at most {MAX_BYTES} characters, not {size}")
    try:
        grammar = calls.grammar(offered, tools.parallel)
        grammar = grammar if answer is None else or_answer(grammar, answer)
    except RecursionError:
        raise wrong("tools", "have parameters that are nested too deeply") from None
    held = replace(first, grammar=grammar, json_schema=None, json_object=None)
    path = request.constrained_by or "tools"
    return replace(request, requests=(held,), constrained_by=path, functions=offered)


def _schema_of(request: Request, path: str) -> Mapping[str, Any] | None:
    """The JSON schema that an answer has to follow; None: there is none. `path` names its field in errors."""
    if request.json_object:
        return {"type": "object"}
    schema: Any = request.json_schema
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"is no JSON: {no_json(error)}") from None
    if schema is not None and not isinstance(schema, Mapping):
        raise wrong(path, "must be a JSON object")
    return schema


def _http_request(fields: Sorted, requests: list[Request], chat: bool) -> HttpRequest:
    stream, constrained = fields.own.get("stream", False), constraint_of(fields.own)
    usage = _stream_options(fields.own.get("stream_options"), stream)
    request = HttpRequest(
        requests=tuple(requests),
        chat=chat,
        stream=stream,
        include_usage=usage.get("include_usage", False),
        continuous_usage=usage.get("include_usage", False) and usage.get("continuous_usage_stats", False),
        top_logprobs=requests[0].logprobs,
        constrained_by=constrained.path if constrained else "",
        names=_names(fields, chat),
    )
    shown = "prompt_logprobs" in fields.options
    return replace(request, prompt_logprobs=_not_streamed("prompt_logprobs", shown, request))


def _names(fields: Sorted, chat: bool) -> dict[str, str]:
    """See `HttpRequest.names`."""
    names = {"logprobs": "top_logprobs"} if chat else {}
    if fields.own.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if len(fields.options.get("stop", ())) == 1:
        names["stop[0]"] = "stop"
    return names


def _not_streamed(name: str, wanted: bool, request: HttpRequest) -> bool:
    """Return `wanted`. Raises Problem if it is true in a stream, whose parts have no place for it."""
    if wanted and request.stream:
        raise wrong(name, "is for whole answers; set stream to false, or leave it out")
    return wanted


def _options(fields: Sorted) -> dict[str, Any]:
    """The client's options."""
    options = dict(fields.options)
    limit = _max_tokens(fields.own)
    if limit is not None:
        options["max_tokens"] = limit
    if constrained := constraint_of(fields.own):
        options[constrained.option] = constrained.value
    return options | _speculation(fields.own.get("speculation"))


def _max_tokens(own: dict[str, Any]) -> int | None:
    old, new = own.get("max_tokens"), own.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", "differs from max_completion_tokens; leave it out")
    limit: int | None = old if new is None else new
    return limit


def _speculation(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    found = values.members("speculation", value, {"mode", "max_nodes", "max_depth", "seconds_per_token"})
    if found.get("mode", "auto") not in MODES:
        raise wrong("speculation.mode", f"must be one of {', '.join(MODES)}")
    readers = {"max_nodes": values.count, "max_depth": values.count, "seconds_per_token": values.number}
    return found | {
        name: read(f"speculation.{name}", found[name]) for name, read in readers.items() if name in found
    }


def _stream_options(value: Any, stream: bool) -> dict[str, bool]:
    if value is None:
        return {}
    if not stream:
        raise wrong("stream_options", "needs stream to be true")
    known = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    found = values.members("stream_options", value, known)
    for name, flag in found.items():
        values.flag(f"stream_options.{name}", flag)
    return found


def _prompts(value: Any) -> list[str] | list[tuple[int, ...]]:
    """Prompts, from a text, texts, token ids, or lists of token ids."""
    if value is None:
        raise wrong("prompt", "is missing")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "must be a string, a list of strings, token ids, or lists of token ids")
    if isinstance(value[0], int | float):
        return [values.ids("prompt", value)]
    if len(value) > MAX_PROMPTS:
        raise wrong("prompt", f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
    if isinstance(value[0], str):
        return values.listed("prompt", value, values.text)
    return values.listed("prompt", value, values.ids)
