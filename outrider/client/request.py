"""A request to an orchestrator. The service chooses the values of absent parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from outrider.client.conversation import Conversation, Message, Tool, Tools, json_text, message_of, tool_of
from outrider.protocol.errors import InvalidRequest

Mode = Literal["auto", "sequential", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)


Prompt: TypeAlias = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation: messages, or mappings in the OpenAI API's format."""


class Options(TypedDict, total=False):
    """Parameters of a request other than its prompt; generation.proto and tokens.proto describe them."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    n: int
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    mode: Mode
    max_nodes: int
    max_depth: int
    seconds_per_token: float
    prediction: str | Sequence[int]
    task: str
    priority: int
    do_not_collect: bool
    session: bytes
    keep_session: bool
    record_timeline: bool
    record_steps: bool
    resume_token_ids: Sequence[int]
    model_version: str
    include_stop: bool
    keep_special_tokens: bool
    prompt_logprobs: int
    default_temperature: float
    labels: Mapping[str, str]
    truncate_prompt_tokens: int
    tools: Tools
    chat_template_kwargs: str | Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


CALL = ("timeout", "token", "request_id", "traceparent")


class CallOptions(Options, total=False):
    """The `Options`, and how the request is sent; absent or None stands for the client's own setting."""

    timeout: float | None
    """Longest duration of the whole request in seconds, its retries included."""
    token: str | None
    request_id: str
    traceparent: str


class TokenizeOptions(TypedDict, total=False):
    """Parameters of `tokenize` other than its prompt; see `TokenizeRequest` in generation.proto."""

    model: str
    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Tools
    chat_template_kwargs: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt with its options. `None` stands for an absent option, which is not the same as zero."""

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    chat: bool = False
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    n: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping. At most one of this and the next four may be given."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    mode: Mode = "auto"
    max_nodes: int | None = None
    max_depth: int | None = None
    seconds_per_token: float | None = None
    """Seconds per token that the caller needs after the first token."""
    prediction: str | Sequence[int] = ""
    """Text or token ids that the answer will resemble; empty: none."""
    task: str = ""
    priority: int = 0
    do_not_collect: bool = False
    """Keep the request out of the tokens that the service collects to train its drafts."""
    session: bytes = b""
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    resume_token_ids: Sequence[int] = ()
    model_version: str = ""
    """The `Started.model_version` of the text to continue; empty: any weights that are served."""
    include_stop: bool | None = None
    """Keep the stop string, or the token, that ended the text."""
    keep_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    default_temperature: float | None = None
    """Temperature if neither the request nor the model has one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    truncate_prompt_tokens: int = 0
    tools: Sequence[Tool] = ()
    """Tools; only with a conversation, like the next three."""
    chat_template_kwargs: str = ""
    """A JSON object."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def count(self) -> int:
        """Number of continuations that are asked for."""
        return 1 if self.n is None else self.n


def request_of(prompt: Prompt | Request, options: Options) -> Request:
    """A request from a caller's prompt and options.

    Raises:
        InvalidRequest: the prompt is not a text, token ids or messages, or options came with a `Request`.
    """
    if not isinstance(prompt, Request):
        found = _prompt(prompt)
        given: dict[str, Any] = {**options, **_chat_options(options)}
        return Request(prompt=found, chat=_is_chat(found), **given)
    if options:
        raise InvalidRequest(min(options), "is given twice: put it into the Request")
    return prompt


def _is_chat(prompt: str | tuple[Any, ...]) -> bool:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], Message)


def _prompt(prompt: Prompt) -> str | tuple[int, ...] | tuple[Message, ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):  # bytes would be token ids
        raise InvalidRequest("prompt", "must be a text, token ids or messages")
    parts: tuple[Any, ...] = tuple(prompt)
    if all(isinstance(part, int) for part in parts):
        return parts
    return tuple(message_of(f"prompt[{index}]", part) for index, part in enumerate(parts))


def _chat_options(options: Any) -> dict[str, Any]:
    """The options that may be written in more than one way, in the form that a `Request` has."""
    found: dict[str, Any] = {}
    if "tools" in options:
        found["tools"] = tuple(tool_of(f"tools[{i}]", tool) for i, tool in enumerate(options["tools"]))
    if "chat_template_kwargs" in options:
        found["chat_template_kwargs"] = json_text("chat_template_kwargs", options["chat_template_kwargs"])
    return found
