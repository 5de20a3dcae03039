"""Every field of the endpoints, and how it is treated. docs/openai.md shows the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.errors import Problem, wrong
from orchestrator.gateway.incoming import constraints, values
from orchestrator.gateway.incoming.values import Reader


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


COMMON: Mapping[str, Field] = {
    "model": Option(values.text, "model"),
    "stream": Own(values.flag),
    "stream_options": Own(_anything),
    "seed": Option(values.seed, "seed"),
    "stop": Option(values.stop, "stop"),
    "temperature": Option(values.number, "temperature"),
    "top_p": Option(values.number, "top_p"),
    "presence_penalty": Option(values.number, "presence_penalty"),
    "frequency_penalty": Option(values.number, "frequency_penalty"),
    "logit_bias": Option(values.bias, "logit_bias"),
    "user": Ignored(),
    # vLLM's
    "top_k": Option(values.top_k, "top_k"),
    "min_p": Option(values.number, "min_p"),
    "repetition_penalty": Option(values.number, "repetition_penalty"),
    "ignore_eos": Option(values.flag, "ignore_eos"),
    "min_tokens": Option(values.count, "min_tokens"),
    "stop_token_ids": Option(values.ids, "stop_token_ids"),
    "priority": Option(values.priority, "priority"),
    "skip_special_tokens": Option(values.switched_off, "keep_special_tokens"),
    "spaces_between_special_tokens": Only((True, False)),
    "include_stop_str_in_output": Option(values.flag, "include_stop"),
    "use_beam_search": Only((False,)),
    "length_penalty": Only((1.0,)),
    "truncate_prompt_tokens": Option(values.top_k, "truncate_prompt_tokens"),
    "guided_json": Own(constraints.schema),
    "guided_regex": Own(constraints.regex),
    "guided_choice": Own(constraints.choice),
    "guided_grammar": Own(constraints.grammar),
    "structured_outputs": Own(constraints.structured_outputs),
    # Ours
    "task": Option(values.text, "task"),
    "labels": Option(values.texts, "labels"),
    "speculation": Own(_anything),
}
CHOICES: Mapping[str, Field] = {
    **COMMON,
    "n": Option(values.continuations, "n"),
    "max_tokens": Own(values.count),
    "prompt_logprobs": Option(values.count, "prompt_logprobs"),
    "response_format": Own(constraints.response_format),
}
COMPLETIONS: Mapping[str, Field] = {
    **CHOICES,
    "prompt": Own(_anything),
    "logprobs": Option(values.count, "logprobs"),
    "best_of": Only((1,)),
    "echo": Own(values.flag),
    "suffix": Only(("",)),
    "add_special_tokens": Only((True,)),
}
CHAT: Mapping[str, Field] = {
    **CHOICES,
    "messages": Own(_anything),
    "max_completion_tokens": Own(values.count),
    "logprobs": Own(values.flag),
    "top_logprobs": Own(values.count),
    "store": Option(values.never_stored, "do_not_collect"),
    "metadata": Ignored(),
    "service_tier": Ignored(),
    "safety_identifier": Ignored(),
    "prompt_cache_key": Ignored(),
    "prompt_cache_retention": Ignored(),
    "prompt_cache_options": Ignored(),
    "moderation": Refused(),
    "echo": Only((False,)),
    "tools": Own(values.tools),
    "tool_choice": Own(_anything),
    "parallel_tool_calls": Own(values.flag),
    "functions": Only(([],)),
    "function_call": Only(("none",)),
    "modalities": Only((["text"],)),
    "audio": Refused(),
    "prediction": Option(values.prediction, "prediction"),
    "reasoning_effort": Only(("none",)),
    "verbosity": Refused(),
    "web_search_options": Refused(),
    "add_generation_prompt": Option(values.flag, "add_generation_prompt"),
    "continue_final_message": Option(values.flag, "continue_final_message"),
    "add_special_tokens": Only((False,)),
    "chat_template": Refused(),
    "chat_template_kwargs": Own(values.mapping),
    "documents": Refused(),
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
    "previous_response_id": STORED,
    "conversation": STORED,
    "prompt": Refused("send its text as instructions"),
    "context_management": Refused("shorten input yourself"),
    "moderation": Refused(),
    "image": Refused(),
    "background_options": Refused(),
    "background": Only((False,)),
    "truncation": Only(("disabled",)),
    "reasoning": Only(({"effort": "none"}, {})),
    "max_tool_calls": Ignored(),
    "access_programs": Ignored(),
    "service_tier": Ignored(),
    "safety_identifier": Ignored(),
    "prompt_cache_key": Ignored(),
    "prompt_cache_retention": Ignored(),
    "prompt_cache_options": Ignored(),
}

TOKENIZE: Mapping[str, Field] = {
    "model": Option(values.text, "model"),
    "prompt": Own(values.text),
    "messages": Own(_anything),
    "add_special_tokens": Option(values.flag, "add_special_tokens"),
    "add_generation_prompt": Option(values.flag, "add_generation_prompt"),
    "return_token_strs": Only((False,)),
    "continue_final_message": Option(values.flag, "continue_final_message"),
    "chat_template": Refused(),
    "chat_template_kwargs": Own(values.mapping),
    "media_io_kwargs": Refused(),
    "mm_processor_kwargs": Refused(),
    "tools": Own(values.tools),
}
DETOKENIZE: Mapping[str, Field] = {
    "model": Option(values.text, "model"),
    "tokens": Own(values.ids),
}


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
        raise Problem(wrong("", "").kind, "the body must be a JSON object")
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
