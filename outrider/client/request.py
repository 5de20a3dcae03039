"""What is asked of an orchestrator. Absent parameters are the service's to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

from outrider.protocol.errors import InvalidRequest

Mode = Literal["auto", "sequential", "off"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; the role is such as system, user or assistant."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message] | Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation: messages, or mappings with `role` and `content`."""


class Options(TypedDict, total=False):
    """Parameters of a request beside its prompt; generation.proto and tokens.proto describe them."""

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
    prediction: str | Sequence[int]
    task: str
    priority: int
    session: bytes
    keep_session: bool
    record_timeline: bool
    record_steps: bool
    resume_token_ids: Sequence[int]


class TokenizeOptions(TypedDict, total=False):
    """Parameters of `tokenize` beside its prompt; `TokenizeRequest` of generation.proto describes them."""

    model: str
    add_special_tokens: bool | None
    add_generation_prompt: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt with its options. `None` is absent, which is not the same as zero."""

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
    """A JSON schema, as text or as what JSON makes of it; of this and the next four, one at most."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    mode: Mode = "auto"
    max_nodes: int | None = None
    max_depth: int | None = None
    prediction: str | Sequence[int] = ""
    """Text or token ids that the answer will resemble; empty: none."""
    task: str = ""
    priority: int = 0
    session: bytes = b""
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    resume_token_ids: Sequence[int] = ()

    @property
    def count(self) -> int:
        """Continuations asked for."""
        return 1 if self.n is None else self.n


def request_of(prompt: Prompt | Request, options: Options) -> Request:
    """A request from what a caller gave.

    Raises:
        InvalidRequest: the prompt is none of text, token ids and messages, or options came with a `Request`.
    """
    if not isinstance(prompt, Request):
        found = _prompt(prompt)
        return Request(prompt=found, chat=_is_chat(found), **options)
    if options:
        raise InvalidRequest(min(options), "is given twice: put it into the Request")
    return prompt


def _is_chat(prompt: str | tuple[Any, ...]) -> bool:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], Message)


def _prompt(prompt: Prompt) -> str | tuple[int, ...] | tuple[Message, ...]:
    if isinstance(prompt, str):
        return prompt
    parts: tuple[Any, ...] = tuple(prompt)
    if all(isinstance(part, int) for part in parts):
        return parts
    return tuple(_message(index, part) for index, part in enumerate(parts))


def _message(index: int, part: Any) -> Message:
    if isinstance(part, Message):
        return part
    if not isinstance(part, Mapping) or set(part) != {"role", "content"}:
        raise InvalidRequest(f"prompt[{index}]", "must be a token id, or a message with role and content")
    return Message(part["role"], part["content"])
