"""Settings from flags, environment, file and defaults, in this order, with the source of every value.

Each field of a settings class is a flag (`max_sessions`: `--max-sessions`), an environment variable
(`OUTRIDER_VERIFY_MAX_SESSIONS`) and a key in the service's table of a TOML file (`[verify] max_sessions`).
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from outrider.config import Settings
from outrider.protocol.errors import ConfigError

_S = TypeVar("_S", bound=Settings)

DEFAULT = "default"
WORDS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a number of fewer digits",
    "int_type": "must be a whole number",
    "less_than_equal": "must be {le} or less",
    "string_pattern_mismatch": "must be an origin such as https://chat.example, or *",
    "string_type": "must be a text",
    "too_short": "must have at least one entry",
    "tuple_type": "must be a list",
}
"""What pydantic finds wrong, by its type of error; its own sentences speak of parsing."""
SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)$")
"""Matches variables that Kubernetes sets for a service called outrider; they are no settings."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[_S]):
    """Valid settings, and where each value came from."""

    table: str
    config: _S
    sources: Mapping[str, str]

    def given(self, name: str) -> bool:
        """Whether somebody set the field."""
        return self.sources[name] != DEFAULT

    def render(self) -> str:
        """The settings as TOML, each with its source as a comment."""
        values = self.config.model_dump(mode="json")
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        width = max(len(line) for line in lines)
        sources = [self.sources[name] for name in values]
        body = [f"{line:<{width}}  # {source}" for line, source in zip(lines, sources, strict=True)]
        return "\n".join([f"[{self.table}]", *body])


class _Raw(NamedTuple):
    value: Any
    source: str


def add_flags(parser: argparse.ArgumentParser, settings: type[Settings], table: str) -> None:
    """Add one flag per field, `--config` and `--print-config`. Flags that are not given are not in the
    parsed arguments."""
    group = parser.add_argument_group(
        "settings", f"environment OUTRIDER_{table.upper()}_..., file table [{table}]"
    )
    for name, field in settings.model_fields.items():
        _add_flag(group, name, field)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (environment OUTRIDER_CONFIG)"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting with its source and exit"
    )


def resolve(
    table: str, settings: type[_S], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Resolved[_S]:
    """The settings of one service.

    Raises:
        ConfigError: a value is wrong or a key unknown; names the flag, variable or file key.
    """
    fields = settings.model_fields
    path = arguments.config or environment.get("OUTRIDER_CONFIG", "")
    raw = _from_file(path, table, fields) if path else {}
    _check_services(environment)
    raw |= _from_environment(f"OUTRIDER_{table.upper()}_", environment, fields)
    raw |= _from_flags(arguments, fields)
    values = {name: _split(fields[name], item.value) for name, item in raw.items()}
    try:
        config = settings.model_validate(values)
    except ValidationError as error:
        raise _config_error(error, raw) from error
    sources = {name: raw[name].source if name in raw else DEFAULT for name in fields}
    return Resolved(table, config, sources)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    text = f"{field.description} Default: {_shown(field.default)}.".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag_of(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    action = "append" if _is_list(field) else "store"
    group.add_argument(
        flag_of(name), action=action, default=argparse.SUPPRESS, metavar=_metavar(field), help=text
    )


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "empty"
    return str(default) if default != "" else "empty"


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


def _metavar(field: FieldInfo) -> str:
    kind = field.annotation
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    names: dict[Any, str] = {int: "N", float: "X"}
    return names.get(kind, "TEXT")


def _from_file(path: str, table: str, known: Iterable[str]) -> dict[str, _Raw]:
    content = _read_toml(path)
    values = content.get(table, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {table} must be a table")
    _check_tables(path, content)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{path}: [{table}] {unknown[0]} is not a setting")
    return {name: _Raw(value, f"{path} [{table}] {name}") for name, value in values.items()}


TABLES = ("orchestrator", "draft", "verify", "gateway", "up")


def _check_tables(path: str, content: Mapping[str, Any]) -> None:
    unknown = sorted(set(content) - set(TABLES))
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]} is not a table of ours; use {', '.join(TABLES)}")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path!r} is not valid TOML ({error})") from error
    except RecursionError as error:
        raise ConfigError(f"--config: {path!r} has arrays or tables in each other too deeply") from error


def _check_services(environment: Mapping[str, str]) -> None:
    """Refuse a variable whose service is mistyped; other variables that begin with OUTRIDER_ may be
    anyone's."""
    for variable in sorted(environment):
        ours, _, rest = variable.partition("_")
        service, _, name = rest.lower().partition("_")
        if ours != "OUTRIDER" or not name or service in TABLES or SERVICE_LINK.search(variable):
            continue
        if meant := get_close_matches(service, TABLES, 1, cutoff=0.8):
            right = f"OUTRIDER_{meant[0]}_{name}".upper()
            raise ConfigError(f"{variable}: no service has this name; did you mean {right}?")


def _from_environment(prefix: str, environment: Mapping[str, str], known: Iterable[str]) -> dict[str, _Raw]:
    ours = {name: value for name, value in environment.items() if name.startswith(prefix)}
    variables = {f"{prefix}{name.upper()}": name for name in known}
    for variable in sorted(set(ours) - set(variables)):
        if not SERVICE_LINK.search(variable):
            raise ConfigError(f"{variable}: no setting has this environment variable")
    return {
        variables[variable]: _Raw(value, variable)
        for variable, value in ours.items()
        if variable in variables
    }


def _from_flags(arguments: argparse.Namespace, known: Iterable[str]) -> dict[str, _Raw]:
    given = vars(arguments)
    return {name: _Raw(given[name], _given_flag(name, given[name])) for name in known if name in given}


def _given_flag(name: str, value: Any) -> str:
    flag = flag_of(name)
    return flag.replace("--", "--no-", 1) if value is False else flag


def _split(field: FieldInfo, value: Any) -> Any:
    """The items of a list, which is a comma-separated text, a repeated flag, or an array of a file."""
    if not _is_list(field):
        return value
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(item.strip() for part in parts for item in part.split(",") if item.strip())


def _config_error(error: ValidationError, raw: Mapping[str, _Raw]) -> ConfigError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    source = raw[name].source if name in raw else flag_of(name)
    theirs = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    ours = WORDS.get(first["type"])
    problem = ours.format(**first.get("ctx", {})) if ours else theirs
    shown = "" if isinstance(first["input"], types.NoneType | dict | tuple) else f", not {first['input']!r}"
    result = ConfigError(f"{source}: {problem}{shown}")
    result.field = name or None
    return result
