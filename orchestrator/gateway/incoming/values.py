"""Reads single values of a request's JSON; each function raises `Problem` for a wrong kind of value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.gateway.errors import Problem, wrong
from outrider.protocol.messages import MAX_CONTINUATIONS, SEEDS

Reader = Callable[[str, Any], Any]
"""Takes a field's path and its value, which is not null; returns the value for the orchestrator."""
MAX_UINT32 = 2**32 - 1
MAX_NUMBER = 1e30
MAX_PRIORITY = 100
INCLUDABLE = (
    *("message", "reasoning", "file_search_call", "web_search_call"),
    *("computer_call_output", "code_interpreter_call"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "disabled")
MAX_ENTRIES = 4096
"""Most entries that a list or an object may have. The service accepts more only of token ids. Reading more
would take seconds, and passing it on would keep other callers waiting."""


def text(path: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(path, f"must be a string, not {_kind(value)}")
    return value


def flag(path: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(path, f"must be true or false, not {_kind(value)}")
    return value


def number(path: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(path, f"must be a number, not {_kind(value)}")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise wrong(path, f"must be between {-MAX_NUMBER:g} and {MAX_NUMBER:g}")
    return float(value)


def whole(path: str, value: Any) -> int:
    """A whole number that fits the message's field."""
    found = _whole(value)
    if found is None:
        raise wrong(path, f"must be a whole number, not {value if type(value) is float else _kind(value)}")
    if abs(found) > MAX_UINT32:
        raise wrong(path, f"must be between {-MAX_UINT32} and {MAX_UINT32}")
    return found


def _whole(value: Any) -> int | None:
    """JSON has one kind of number, and languages without integers write 10.0. None: it is no whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def count(path: str, value: Any) -> int:
    """A whole number of 0 or more."""
    found = whole(path, value)
    if found < 0:
        raise wrong(path, f"must be 0 or more, not {found}")
    return found


def seed(path: str, value: Any) -> int:
    """A whole number, modulo 2**64: negative numbers are accepted."""
    found = _whole(value)
    if found is None or not -SEEDS // 2 <= found < SEEDS:
        raise wrong(path, "must be a whole number between -2**63 and 2**64 - 1")
    return found % SEEDS


def continuations(path: str, value: Any) -> int:
    """A number of continuations. It is checked here already, because answers are laid out for each."""
    found = whole(path, value)
    if not 1 <= found <= MAX_CONTINUATIONS:
        raise wrong(path, f"must be between 1 and {MAX_CONTINUATIONS}, not {found}")
    return found


def top_k(path: str, value: Any) -> int:
    """A count; -1 is read as 0, which means off."""
    return 0 if whole(path, value) == -1 else count(path, value)


def priority(path: str, value: Any) -> int:
    """vLLM's priority, in which the lowest is served first; ours is the negative of it.

    It is checked here already, because the service's error would name the negative number.
    """
    found = whole(path, value)
    if abs(found) > MAX_PRIORITY:
        raise wrong(path, f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {found}")
    return -found


def stop(path: str, value: Any) -> tuple[str, ...]:
    """A string, or a list of them."""
    return (value,) if isinstance(value, str) else stop_sequences(path, value)


def stop_sequences(path: str, value: Any) -> tuple[str, ...]:
    """A list of strings."""
    return tuple(listed(path, value, text))


def ids(path: str, value: Any) -> tuple[int, ...]:
    """A list of token ids. A quick check covers all; a slow one follows only to name a wrong entry."""
    if not isinstance(value, list):
        raise wrong(path, f"must be a list, not {_kind(value)}")
    if all(type(one) is int and 0 <= one <= MAX_UINT32 for one in value):
        return tuple(value)
    return tuple(count(f"{path}[{index}]", one) for index, one in enumerate(value))


def bias(path: str, value: Any) -> dict[int, float]:
    """A number for each token id; the ids are strings, as keys in JSON are."""
    if not isinstance(value, dict):
        raise wrong(path, f"must be an object, not {_kind(value)}")
    bounded(path, len(value))
    found = {}
    for token, added in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise wrong(f"{path}[{token[:20]}]", "is not a token id")
        found[count(f"{path}[{token}]", int(token))] = number(f"{path}[{token}]", added)
    return found


def prediction(path: str, value: Any) -> str:
    """The text that the answer will resemble: a text, or parts of text that are joined."""
    found = members(path, value, {"type", "content"})
    if found.get("type") != "content":
        raise wrong(f"{path}.type", "must be content")
    content = found.get("content")
    if not isinstance(content, list):
        return text(f"{path}.content", content)
    return "".join(listed(f"{path}.content", content, part_of_text))


def part_of_text(
    path: str,
    value: Any,
    kinds: Sequence[str] = ("text",),
    notes: Sequence[str] = ("prompt_cache_breakpoint",),
) -> str:
    """The text of a part; parts of other types are refused. `notes` are members that change no text."""
    kind = mapping(path, value).get("type")
    if kind not in kinds:
        raise wrong_type(path, kind, f"use {' or '.join(kinds)}")
    more = {"annotations", "logprobs", "parsed"} if kind == "output_text" else set()
    part = members(path, value, {"type", "text", *notes, *more})
    return text(f"{path}.text", part.get("text"))


def wrong_type(path: str, kind: Any, known: str) -> Problem:
    """The problem for an object of a type that is not read here; `known` says which are."""
    found = "is missing" if kind is None else f"{str(kind)[:40]!r} is not supported"
    return wrong(f"{path}.type", f"{found}; {known}")


def listed(path: str, value: Any, each: Reader) -> list[Any]:
    """A list whose entries are all read by `each`."""
    if not isinstance(value, list):
        raise wrong(path, f"must be a list, not {_kind(value)}")
    bounded(path, len(value))
    return [each(f"{path}[{index}]", entry) for index, entry in enumerate(value)]


def bounded(path: str, size: int, entries: str = "entries") -> None:
    """Raise Problem when there are more entries than are read."""
    if size > MAX_ENTRIES:
        raise wrong(path, f"must have at most {MAX_ENTRIES} {entries}, not {size}")


def members(path: str, value: Any, known: set[str]) -> dict[str, Any]:
    """An object that has only known keys; members that are null are left out."""
    found = {name: member for name, member in mapping(path, value).items() if member is not None}
    unknown = sorted(set(found) - known)
    if unknown:
        raise wrong(f"{path}.{unknown[0][:100]}", "is not supported; leave it out")
    return found


def mapping(path: str, value: Any) -> dict[str, Any]:
    """An object with any keys."""
    if not isinstance(value, dict):
        raise wrong(path, f"must be an object, not {_kind(value)}")
    return value


def texts(path: str, value: Any) -> dict[str, str]:
    """An object whose members are strings."""
    bounded(path, len(mapping(path, value)))
    return {name: text(f"{path}.{name[:100]}", member) for name, member in value.items()}


def tools(path: str, value: Any) -> list[Any]:
    """A list; its entries are read later."""
    return listed(path, value, lambda _path, entry: entry)


def included(path: str, value: Any) -> list[str]:
    """Names of what the answer also shows. Names of tools and reasoning, which it never has, do nothing."""
    found = listed(path, value, text)
    for index, one in enumerate(found):
        if one.partition(".")[0] not in INCLUDABLE:
            raise wrong(f"{path}[{index}]", f"{one[:40]!r} is not known; leave it out")
    return found


def effort(path: str, value: Any) -> str:
    """How much a model should reason."""
    if value not in EFFORTS:
        raise wrong(path, f"must be one of {', '.join(EFFORTS)}")
    return text(path, value)


def reasoning(path: str, value: Any) -> str | None:
    """The effort in an object; reasoning is shown as it is, so that summaries do nothing."""
    found = members(path, value, {"effort", "summary", "generate_summary"})
    return effort(f"{path}.effort", found["effort"]) if "effort" in found else None


def thinking(path: str, value: Any) -> dict[str, bool]:
    """The template variable for Anthropic's switch. Budgets do nothing; reasoning is shown as it is."""
    found = members(path, value, {"type", "budget_tokens", "display"})
    count(f"{path}.budget_tokens", found.get("budget_tokens", 0))
    if found.get("type") not in THINKING:
        raise wrong(f"{path}.type", f"must be one of {', '.join(THINKING)}")
    return {"enable_thinking": found["type"] != "disabled"}


def switched_off(path: str, value: Any) -> bool:
    """The opposite of a flag."""
    return not flag(path, value)


def never_stored(path: str, value: Any) -> bool:
    """True when a flag is false. A true flag is refused, because nothing that is stored could be fetched."""
    if flag(path, value):
        raise wrong(path, "is supported as false only; leave it out")
    return True


def _kind(value: Any) -> str:
    names = {bool: "true or false", str: "a string", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "null" if value is None else "an object")
