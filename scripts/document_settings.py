"""Write docs/configuration.md from the settings classes: `python -m scripts.document_settings`."""

from __future__ import annotations

import types
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from outrider.cli.up_plan import UpConfig
from outrider.config import DraftConfig, GatewayConfig, OrchestratorConfig, Settings, VerifyConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/configuration.md"
TABLES: dict[str, type[Settings]] = {
    "up": UpConfig,
    "orchestrator": OrchestratorConfig,
    "verify": VerifyConfig,
    "draft": DraftConfig,
    "gateway": GatewayConfig,
}
COMMANDS = {name: "outrider up" if name == "up" else f"outrider serve {name}" for name in TABLES}
INTRODUCTION = """\
# Configuration

This page is written by `make docs` from the settings classes; a test checks that it is current.

Every setting is a flag, an environment variable and a key in a TOML file, in this order of precedence,
and last its default. For `max_sessions` of the verify service:

| | |
|---|---|
| flag | `outrider serve verify --max-sessions 16` |
| environment | `OUTRIDER_VERIFY_MAX_SESSIONS=16` |
| file | `[verify]` with `max_sessions = 16`; named by `--config` or `OUTRIDER_CONFIG` |

`--print-config` prints every value with its source and exits. Lists are repeated flags or text separated by
commas.

Every command ends with one of these statuses; with 1 and 2 one sentence on standard error says why:

| status | when |
|---|---|
| 0 | it did what was asked, or a service was told to end |
| 1 | it failed: nobody answers, the stream broke for good, a process or an engine crashed |
| 2 | it was asked for wrongly: a flag, a setting, a missing file, a port in use, a pair that does not fit |
| 130 | Ctrl-C ended `generate` or `timeline` |

2 is also the status of a request that the orchestrator refuses as it is: another try would be refused too.
`outrider up` ends with 1 or 2 when a process does not start; one that crashes later is started again.

Traces go where the standard `OTEL_*` variables say, such as `OTEL_EXPORTER_OTLP_ENDPOINT`;
`OTEL_TRACES_SAMPLER` decides which requests. Without them nothing is recorded; see [tracing](tracing.md).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(name, settings) for name, settings in TABLES.items())])


def _section(name: str, settings: type[Settings]) -> str:
    prefix = f"OUTRIDER_{name.upper()}_"
    rows = [_row(setting, field) for setting, field in settings.model_fields.items()]
    head = f"## `{COMMANDS[name]}`\n\n{settings.__doc__}".rstrip()
    table = ["| setting | values | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([head, f"Environment: `{prefix}...`; file: `[{name}]`.", "", *table, ""])


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_values(field)} | {_default(field.default)} | {field.description} |"


def _values(field: FieldInfo) -> str:
    kind = field.annotation
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "list of texts"
    names: dict[object, str] = {int: "whole number", float: "number", bool: "on, off", str: "text"}
    assert not isinstance(kind, types.UnionType), "no setting is of several kinds"
    return names[kind]


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if value not in ("", ()) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
