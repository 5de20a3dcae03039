"""Every field of the endpoints, and how it is treated. docs/openai.md shows the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway import constraints, reading
from orchestrator.gateway.errors import Problem, wrong
from orchestrator.gateway.reading import Reader


@dataclass(frozen=True, slots=True)
class Option:
    """A field that is passed on as an option of the client's request."""

    read: Reader
    name: str


@dataclass(frozen=True, slots=True)
class Own:
    """A field that is read by name where the request is made."""

    read: Reader


@dataclass(frozen=True, slots=True)
class Only:
    """A field that is accepted at these values only, which change nothing."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that does not concern the text."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Would change the text, and is not supported."""


Field = Option | Own | Only | Ignored | Refused
"""What is done with a field. Null is the same as absent for all of them."""


def _anything(_path: str, value: Any) -> Any:
    return value


COMMON: Mapping[str, Field] = {
    "model": Option(reading.text, "model"),
    "stream": Own(reading.flag),
    "stream_options": Own(_anything),
    "n": Option(reading.continuations, "n"),
    "seed": Option(reading.seed, "seed"),
    "stop": Option(reading.stop, "stop"),
    "temperature": Option(reading.number, "temperature"),
    "top_p": Option(reading.number, "top_p"),
    "presence_penalty": Option(reading.number, "presence_penalty"),
    "frequency_penalty": Option(reading.number, "frequency_penalty"),
    "logit_bias": Option(reading.bias, "logit_bias"),
    "max_tokens": Own(reading.count),
    "user": Ignored(),
    # vLLM's
    "top_k": Option(reading.top_k, "top_k"),
    "min_p": Option(reading.number, "min_p"),
    "repetition_penalty": Option(reading.number, "repetition_penalty"),
    "ignore_eos": Option(reading.flag, "ignore_eos"),
    "min_tokens": Option(reading.count, "min_tokens"),
    "stop_token_ids": Option(reading.ids, "stop_token_ids"),
    "priority": Option(reading.priority, "priority"),
    "skip_special_tokens": Option(reading.switched_off, "keep_special_tokens"),
    "spaces_between_special_tokens": Only((True, False)),
    "include_stop_str_in_output": Option(reading.flag, "include_stop"),
    "use_beam_search": Only((False,)),
    "length_penalty": Only((1.0,)),
    "prompt_logprobs": Option(reading.count, "prompt_logprobs"),
    "truncate_prompt_tokens": Option(reading.top_k, "truncate_prompt_tokens"),
    "guided_json": Own(constraints.schema),
    "guided_regex": Own(constraints.regex),
    "guided_choice": Own(constraints.choice),
    "guided_grammar": Own(constraints.grammar),
    "structured_outputs": Own(constraints.structured_outputs),
    "response_format": Own(constraints.response_format),
    # Ours
    "task": Option(reading.text, "task"),
    "labels": Option(reading.texts, "labels"),
    "speculation": Own(_anything),
}
COMPLETIONS: Mapping[str, Field] = {
    **COMMON,
    "prompt": Own(_anything),
    "logprobs": Option(reading.count, "logprobs"),
    "best_of": Only((1,)),
    "echo": Own(reading.flag),
    "suffix": Only(("",)),
    "add_special_tokens": Only((True,)),
}
CHAT: Mapping[str, Field] = {
    **COMMON,
    "messages": Own(_anything),
    "max_completion_tokens": Own(reading.count),
    "logprobs": Own(reading.flag),
    "top_logprobs": Own(reading.count),
    "store": Option(reading.never_stored, "do_not_collect"),
    "metadata": Ignored(),
    "service_tier": Ignored(),
    "safety_identifier": Ignored(),
    "prompt_cache_key": Ignored(),
    "prompt_cache_retention": Ignored(),
    "echo": Only((False,)),
    "tools": Own(reading.tools),
    "tool_choice": Own(_anything),
    "parallel_tool_calls": Own(reading.flag),
    "functions": Only(([],)),
    "function_call": Only(("none",)),
    "modalities": Only((["text"],)),
    "audio": Refused(),
    "prediction": Option(reading.prediction, "prediction"),
    "reasoning_effort": Only(("none",)),
    "verbosity": Refused(),
    "web_search_options": Refused(),
    "add_generation_prompt": Option(reading.flag, "add_generation_prompt"),
    "continue_final_message": Option(reading.flag, "continue_final_message"),
    "add_special_tokens": Only((False,)),
    "chat_template": Refused(),
    "chat_template_kwargs": Own(reading.mapping),
    "documents": Refused(),
}

TOKENIZE: Mapping[str, Field] = {
    "model": Option(reading.text, "model"),
    "prompt": Own(reading.text),
    "messages": Own(_anything),
    "add_special_tokens": Option(reading.flag, "add_special_tokens"),
    "add_generation_prompt": Option(reading.flag, "add_generation_prompt"),
    "return_token_strs": Only((False,)),
    "continue_final_message": Option(reading.flag, "continue_final_message"),
    "chat_template": Refused(),
    "chat_template_kwargs": Own(reading.mapping),
    "media_io_kwargs": Refused(),
    "mm_processor_kwargs": Refused(),
    "tools": Own(reading.tools),
}
DETOKENIZE: Mapping[str, Field] = {
    "model": Option(reading.text, "model"),
    "tokens": Own(reading.ids),
}


@dataclass(frozen=True, slots=True)
class Sorted:
    """The fields of one request."""

    options: dict[str, Any]
    """What is passed on, by the client's names."""
    own: dict[str, Any]
    """What the endpoint makes something of, by the request's names."""


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
            raise wrong(name, "is not supported; leave it out")
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
