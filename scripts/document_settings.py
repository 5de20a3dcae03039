"""Write docs/configuration.md from the settings classes: `python -m scripts.document_settings`."""

from __future__ import annotations

import typing

from pydantic.fields import FieldInfo

from outrider.cli.up.plan import UpConfig
from outrider.config import (
    CallerConfig,
    CollectConfig,
    DraftConfig,
    EngineConfig,
    GatewayConfig,
    OrchestratorConfig,
    OutputConfig,
    ProcessConfig,
    RunConfig,
    ServiceConfig,
    Settings,
    VerifyConfig,
)
from scripts.child import ROOT
from scripts.console import new_parser

PAGE = ROOT / "docs/configuration.md"
COMMANDS: dict[type[Settings], str] = {
    UpConfig: "up",
    OrchestratorConfig: "orchestrator",
    VerifyConfig: "verify",
    DraftConfig: "draft",
    GatewayConfig: "gateway",
}
"""The name of each settings class in environment variables and in tables of the file."""
SHARED: dict[type[Settings], str] = {
    RunConfig: "All of these",
    CollectConfig: "`outrider up` and `outrider serve orchestrator`",
    OutputConfig: "`outrider up` and `outrider serve gateway`",
    ProcessConfig: "All services and the gateway",
    CallerConfig: "The orchestrator and the gateway",
    ServiceConfig: "The gRPC services",
    EngineConfig: "`outrider serve verify` and `outrider serve draft`",
}
INTRODUCTION = """\
# Configuration

`make docs` writes this page.

Each setting can be a flag, an environment variable or a key in a TOML file, in this order of precedence:

    outrider serve verify --max-sessions 16
    OUTRIDER_VERIFY_MAX_SESSIONS=16
    max_sessions = 16       # below [verify], in the file that --config or OUTRIDER_CONFIG names

`--print-config` prints every value with its source. For a list, repeat the flag, or separate items by commas.
Variables of shared settings have each service's own prefix. Where a service lists a shared setting again, its
own entry holds. `OTEL_*` variables are for [traces](tracing.md); gRPC uses no proxy that the environment
names. Below, `=` precedes the default.

Exit statuses: 0: done, or asked to stop; 1: failed; 2: used wrongly (a flag, a setting, a missing file, a
port in use, a pair that does not fit); 130: Ctrl-C ended a command other than `up`, `serve` and `top`, which
run until then. With 1 and 2, one sentence on standard error says why, unless 1 means that the reader of the
output has gone, as in `outrider generate ... | head`. `outrider up` ends when a process does not start, and
restarts one that crashes later.

## On several machines

`outrider up` runs all services on one machine, [Kubernetes](kubernetes.md) on several. By hand, on machines
a, b and c ([unprotected](security.md)):

    outrider serve verify --model TARGET --host 0.0.0.0 --port 7701                   # a
    outrider serve draft --model DRAFT --host 0.0.0.0 --port 7702                     # b
    outrider serve orchestrator --host 0.0.0.0 --verify a:7701 --draft b:7702         # c
    outrider serve gateway --host 0.0.0.0                                             # c: HTTP on 8000
"""


def page() -> str:
    """The whole page."""
    shared = [_section(title, settings) for settings, title in SHARED.items()]
    titles = {name: f"`outrider serve {name}`" for name in COMMANDS.values()} | {"up": "`outrider up`"}
    commands = [_section(titles[name], settings, name) for settings, name in COMMANDS.items()]
    return "\n".join([INTRODUCTION, commands[0], *shared, *commands[1:]])


def _section(title: str, settings: type[Settings], name: str = "") -> str:
    where = [f"Environment `OUTRIDER_{name.upper()}_...`, file `[{name}]`."] if name else []
    passed = [f"`{setting}`" for setting in settings.__annotations__ if _passed_on(settings, setting)]
    where += [f"Passed on to the services, which document them below: {', '.join(passed)}."] if passed else []
    rows = [_row(setting, settings.model_fields[setting]) for setting in _own(settings)]
    return "\n".join([f"## {title}", "", *where, *([""] if where else []), *rows, ""])


def _passed_on(settings: type[Settings], name: str) -> bool:
    """Whether `up` passes a setting on to a service that has it with the same name and default."""
    if settings is not UpConfig:
        return False
    default = settings.model_fields[name].default
    services = (OrchestratorConfig, VerifyConfig)
    return any(name in one.model_fields and one.model_fields[name].default == default for one in services)


def _own(settings: type[Settings]) -> list[str]:
    """The settings that a class adds or changes, without those that every command redefines."""
    own = [name for name in settings.__annotations__ if not _passed_on(settings, name)]
    users = [command for command in COMMANDS if issubclass(command, settings)]
    field = settings.model_fields
    return [name for name in own if any(_same(field[name], user.model_fields[name]) for user in users)]


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    return (one.default, one.description) == (other.default, other.description)


def _row(name: str, field: FieldInfo) -> str:
    return f"- `{name}{_default(field.default)}`: {_meaning(field)}"


def _meaning(field: FieldInfo) -> str:
    """The meaning of a setting, with its allowed values if neither text nor default shows them."""
    kind, text = field.annotation, str(field.description).removesuffix(".")
    if typing.get_origin(kind) is typing.Literal:
        values = typing.get_args(kind)
        return f"{text}." if all(value in text for value in values) else f"{text} (`{'`, `'.join(values)}`)."
    return f"{text} (a list)." if typing.get_origin(kind) is tuple else f"{text}."


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "=on" if value else "=off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"={value}" if value != "" else ""


if __name__ == "__main__":
    new_parser(__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
