"""Every field of the endpoints, and how it is treated. docs/openai.md shows the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.errors import KINDS, Problem, wrong
from orchestrator.gateway.incoming import constraints, values
from orchestrator.gateway.incoming.values import Reader
from outrider.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Option:
    """A field that is passed on as an option of the client's request."""

    read: Reader
    name: str


@dataclass(frozen=True, slots=True)
class Own:
    """A field that the endpoint itself reads, by its name, when it makes the request."""

    read: Reader


@dataclass(frozen=True, slots=True)
class Only:
    """A field that is accepted only with these values, which change nothing."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that does not affect the text."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the text and is not supported."""

    instead: str = "leave it out"
    """What the caller may do instead."""


Field = Option | Own | Only | Ignored | Refused
"""What is done with a field. Null is the same as absent for all of them."""


def _anything(_path: str, value: Any) -> Any:
    return value


def _passed_on(read: Reader, *names: str) -> dict[str, Field]:
    """Fields that the client's request has under the same names."""
    return {name: Option(read, name) for name in names}


def _all(field: Field, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, field)


SAMPLED: Mapping[str, Field] = {
    # OpenAI's
    "stream": Own(values.flag),
    **_passed_on(values.text, "model"),
    **_passed_on(values.number, "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    **_passed_on(values.seed, "seed"),
    **_passed_on(values.bias, "logit_bias"),
    # vLLM's
    "skip_special_tokens": Option(values.switched_off, "keep_special_tokens"),
    "spaces_between_special_tokens": Only((True, False)),
    "include_stop_str_in_output": Option(values.flag, "include_stop"),
    "use_beam_search": Only((False,)),
    "length_penalty": Only((1.0,)),
    "guided_json": Own(constraints.schema),
    "guided_regex": Own(constraints.regex),
    "guided_choice": Own(constraints.choice),
    "guided_grammar": Own(constraints.grammar),
    "guided_decoding_backend": Ignored(),
    "structured_outputs": Own(constraints.structured_outputs),
    **_passed_on(values.number, "min_p", "repetition_penalty"),
    **_passed_on(values.top_k, "top_k", "truncate_prompt_tokens"),
    **_passed_on(values.flag, "ignore_eos"),
    **_passed_on(values.count, "min_tokens"),
    **_passed_on(values.ids, "stop_token_ids"),
    **_passed_on(values.priority, "priority"),
    # Ours
    "speculation": Own(_anything),
    **_passed_on(values.text, "task"),
    **_passed_on(values.texts, "labels"),
}
COMMON: Mapping[str, Field] = {
    **SAMPLED,
    "stream_options": Own(_anything),
    "user": Ignored(),
    **_passed_on(values.stop, "stop"),
}
CHOICES: Mapping[str, Field] = {
    **COMMON,
    "max_tokens": Own(values.count),
    "response_format": Own(constraints.response_format),
    **_passed_on(values.continuations, "n"),
    **_passed_on(values.count, "prompt_logprobs"),
}
COMPLETIONS: Mapping[str, Field] = {
    **CHOICES,
    "prompt": Own(_anything),
    "best_of": Own(values.count),
    "echo": Own(values.flag),
    "suffix": Only(("",)),
    "add_special_tokens": Only((True,)),
    **_passed_on(values.count, "logprobs"),
}
ABOUT_SERVICE = (
    *("service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields of conversations that concern OpenAI's service and not the text."""
CHAT: Mapping[str, Field] = {
    **CHOICES,
    "messages": Own(_anything),
    "max_completion_tokens": Own(values.count),
    "logprobs": Own(values.flag),
    "top_logprobs": Own(values.count),
    "store": Option(values.never_stored, "do_not_collect"),
    "echo": Only((False,)),
    "tools": Own(values.tools),
    "tool_choice": Own(_anything),
    "parallel_tool_calls": Own(values.flag),
    "functions": Only(([],)),
    "function_call": Only(("none",)),
    "modalities": Only((["text"],)),
    "verbosity": Only(("medium",)),
    "reasoning_effort": Own(values.effort),
    "add_special_tokens": Only((False,)),
    "chat_template_kwargs": Own(values.mapping),
    **_passed_on(values.prediction, "prediction"),
    **_passed_on(values.flag, "add_generation_prompt", "continue_final_message"),
    **_all(Refused(), "moderation", "audio", "web_search_options"),
    **_all(Refused(), "chat_template", "documents"),
    **_all(Ignored(), "metadata", *ABOUT_SERVICE),
}
STORED = Refused("nothing is stored; send all earlier items in input")
RESPONSES: Mapping[str, Field] = {
    **COMMON,
    "input": Own(_anything),
    "instructions": Own(values.text),
    "max_output_tokens": Own(values.count),
    "text": Own(constraints.text_format),
    "tools": Own(values.tools),
    "tool_choice": Own(_anything),
    "parallel_tool_calls": Own(values.flag),
    "include": Own(values.included),
    "top_logprobs": Own(values.count),
    "metadata": Own(values.texts),
    "store": Option(values.switched_off, "do_not_collect"),
    "chat_template_kwargs": Own(values.mapping),
    "prompt": Refused("send its text as instructions"),
    "context_management": Refused("shorten input yourself"),
    "background": Only((False,)),
    "truncation": Only(("disabled",)),
    "reasoning": Own(values.reasoning),
    **_all(STORED, "previous_response_id", "conversation"),
    **_all(Refused(), "moderation", "image", "background_options"),
    **_all(Ignored(), "max_tool_calls", "access_programs", "client_metadata", *ABOUT_SERVICE),
}
KEPT = {"type": "clear_thinking_20251015", "keep": "all"}
"""An edit of a conversation that leaves it as it is. Claude Code sends it."""
COUNTED: Mapping[str, Field] = {
    "messages": Own(_anything),
    "system": Own(_anything),
    "tools": Own(values.tools),
    "tool_choice": Own(_anything),
    "thinking": Own(values.thinking),
    "output_config": Own(constraints.output_config),
    "output_format": Own(constraints.output_format),
    "chat_template_kwargs": Own(values.mapping),
    "context_management": Only(({"edits": []}, {"edits": [KEPT]})),
    "cache_control": Ignored(),
    "speed": Only(("standard",)),
    **_passed_on(values.text, "model"),
    **_all(Refused(), "mcp_servers"),
}
THREAD = "thread"
"""Field of Anthropic's clients that asks the service to keep a conversation."""
MESSAGES: Mapping[str, Field] = {
    **SAMPLED,
    **COUNTED,
    "max_tokens": Own(values.count),
    "stop_sequences": Option(values.stop_sequences, "stop"),
    **_all(Refused(), "container", "inference_geo"),
    THREAD: Refused("send the whole conversation"),
    **_all(Ignored(), "metadata", "service_tier", "diagnostics"),
}
TOKENIZE: Mapping[str, Field] = {
    "prompt": Own(values.text),
    "messages": Own(_anything),
    "return_token_strs": Only((False,)),
    "chat_template_kwargs": Own(values.mapping),
    "tools": Own(values.tools),
    **_passed_on(values.text, "model"),
    **_passed_on(values.flag, "add_special_tokens", "add_generation_prompt", "continue_final_message"),
    **_all(Refused(), "chat_template", "media_io_kwargs", "mm_processor_kwargs"),
}
DETOKENIZE: Mapping[str, Field] = {"tokens": Own(values.ids), **_passed_on(values.text, "model")}


@dataclass(frozen=True, slots=True)
class Sorted:
    """The fields of one request."""

    options: dict[str, Any]
    """Options that are passed on, by the client's names."""
    own: dict[str, Any]
    """Fields that the endpoint itself reads, by the request's names."""


def sort_fields(body: Any, known: Mapping[str, Field]) -> Sorted:
    """The fields of a request's JSON, each read and checked by itself.

    Raises:
        Problem: the body is no object, or a field is unknown, not supported, or of the wrong kind.
    """
    if not isinstance(body, dict):
        raise Problem(KINDS[InvalidRequest], "the body must be a JSON object")
    found = Sorted({}, {})
    for name, value in body.items():
        if value is not None:
            _sort(found, name, value, known.get(name))
    return found


def _sort(found: Sorted, name: str, value: Any, field: Field | None) -> None:
    match field:
        case Option():
            found.options[field.name] = field.read(name, value)
        case Own():
            found.own[name] = field.read(name, value)
        case Only():
            _check_neutral(name, value, field)
        case Refused():
            raise wrong(name, f"is not supported; {field.instead}")
        case Ignored():
            pass
        case None:
            raise wrong(name[:100], "is not a field of this endpoint; leave it out")


def _check_neutral(name: str, value: Any, field: Only) -> None:
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in field.values):
        shown = " or ".join(map(_shown, field.values))
        raise wrong(name, f"is supported as {shown} only; leave it out")


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
