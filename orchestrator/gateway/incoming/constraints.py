"""Reads the fields that constrain the text, OpenAI's and vLLM's, into one option of the client's request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values

FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class Constrained(NamedTuple):
    """What the text must be, and the field that says so."""

    path: str
    option: str
    """Name of the client's option that holds the constraint."""
    value: Any


def constraint_of(own: Mapping[str, Any]) -> Constrained | None:
    """The constraint among the fields of a request, if there is one. Guidance sends the same one twice, for
    older and for newer releases of vLLM.

    Raises:
        Problem: fields set different constraints.
    """
    found = [own[name] for name in FIELDS if own.get(name) is not None]
    for other in found[1:]:
        if other[1:] != found[0][1:]:
            raise wrong(other.path, f"cannot be given with {found[0].path}")
    return found[0] if found else None


def response_format(path: str, value: Any) -> Constrained | None:
    """OpenAI's field. As in llama.cpp, a `json_object` may have a schema. `strict`, `name` and `description`
    change nothing: the schema always holds."""
    match values.mapping(path, value).get("type"):
        case "text":
            values.members(path, value, {"type"})
            return None
        case "json_object":
            members = values.members(path, value, {"type", "schema"})
            if "schema" in members:
                return schema(f"{path}.schema", members["schema"])
            return Constrained(path, "json_object", True)
        case "json_schema":
            inside = f"{path}.json_schema"
            given = values.members(path, value, {"type", "json_schema"}).get("json_schema")
            known = {"name", "description", "schema", "strict"}
            return schema(f"{inside}.schema", values.members(inside, given, known).get("schema"))
        case other:
            kind = str(other)[:40]
            raise wrong(f"{path}.type", f"must be text, json_object or json_schema, not {kind!r}")


def text_format(path: str, value: Any) -> Constrained | None:
    """The same field of `/v1/responses`: it is `text.format`, and has the members of `json_schema` itself."""
    inside = f"{path}.format"
    known = {"type", "name", "description", "schema", "strict"}
    given = values.members(path, value, {"format", "verbosity"})
    if given.get("verbosity") not in (None, "medium"):
        raise wrong(f"{path}.verbosity", "is supported as medium only; leave it out")
    members = values.members(inside, given.get("format", {}), known)
    if members.get("type", "text") == "json_schema":
        return schema(f"{inside}.schema", members.get("schema"))
    return response_format(inside, {"type": "text", **members})


def output_config(path: str, value: Any) -> tuple[str | None, Constrained | None]:
    """The effort and the constraint in the field of `/v1/messages`."""
    members = values.members(path, value, {"effort", "format"})
    effort = values.effort(f"{path}.effort", members["effort"]) if "effort" in members else None
    return effort, output_format(f"{path}.format", members["format"]) if "format" in members else None


def output_format(path: str, value: Any) -> Constrained:
    """The constraint alone, as older clients of Anthropic send it."""
    found = values.members(path, value, {"type", "schema"})
    if found.get("type") != "json_schema":
        raise wrong(f"{path}.type", "must be json_schema")
    return schema(f"{path}.schema", found.get("schema"))


def schema(path: str, value: Any) -> Constrained:
    """A JSON schema, or the text of one."""
    if not isinstance(value, str | dict):
        raise wrong(path, "must be a JSON schema: an object, or the text of one")
    return Constrained(path, "json_schema", value if isinstance(value, str) else json.dumps(value))


def regex(path: str, value: Any) -> Constrained:
    """A regular expression."""
    return Constrained(path, "regex", values.text(path, value))


def choice(path: str, value: Any) -> Constrained:
    """The texts of which the answer must be one."""
    texts = values.listed(path, value, values.text)
    if not texts:
        raise wrong(path, "must have at least one text")
    return Constrained(path, "choice", texts)


def grammar(path: str, value: Any) -> Constrained:
    """A grammar."""
    return Constrained(path, "grammar", values.text(path, value))


def structured_outputs(path: str, value: Any) -> Constrained | None:
    """vLLM's field: an object with one member."""
    readers = {"json": schema, "regex": regex, "choice": choice, "grammar": grammar}
    members = values.members(path, value, {*readers, "json_object"})
    if not values.flag(f"{path}.json_object", members.get("json_object", False)):
        members.pop("json_object", None)
    if len(members) > 1:
        raise wrong(path, f"must have one of {', '.join(members)}")
    for name, member in members.items():
        inside = f"{path}.{name}"
        return readers[name](inside, member) if name in readers else Constrained(inside, "json_object", True)
    return None
