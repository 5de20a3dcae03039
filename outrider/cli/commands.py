"""The subcommands: their flags, and what each runs. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any

from outrider import __version__
from outrider.cli import drafts, layer_search
from outrider.cli.advise import flags as advise_flags
from outrider.cli.bench import flags as bench_flags
from outrider.cli.distill import flags as distill_flags
from outrider.cli.plan import flags as plan_flags
from outrider.cli.request import add_connection_flags, add_request_flags, seconds
from outrider.cli.settings import add_flags, resolve
from outrider.cli.up.plan import UpConfig
from outrider.config import DraftConfig, GatewayConfig, OrchestratorConfig, ProcessConfig, VerifyConfig
from outrider.protocol.errors import ConfigError

Subcommands = Any  # argparse._SubParsersAction has no public name

METRICS = "127.0.0.1:9464"
"""Where `outrider top` looks for an orchestrator's page."""

SERVICES: dict[str, tuple[type[ProcessConfig], str, str]] = {
    "orchestrator": (OrchestratorConfig, "orchestrator.main", "the public service: requests in, text out"),
    "draft": (DraftConfig, "draft_service.main", "a draft replica: proposes tokens"),
    "verify": (VerifyConfig, "verify_service.main", "a verify replica: runs the target model"),
    "gateway": (GatewayConfig, "orchestrator.gateway.main", "the OpenAI API over HTTP, before orchestrators"),
}


def add_up(subcommands: Subcommands) -> None:
    """`outrider up`."""
    parser = subcommands.add_parser(
        "up",
        allow_abbrev=False,
        help="run all services on this machine",
        description="Run the orchestrator and its replicas on this machine, each as its own process, until "
        "Ctrl-C. A replica that crashes is restarted. Other settings of the services come from the "
        "environment or the file's tables [orchestrator], [draft] and [verify].",
    )
    add_flags(parser, UpConfig, "up")
    parser.set_defaults(run=_up)


def add_serve(subcommands: Subcommands) -> None:
    """`outrider serve orchestrator|draft|verify|gateway`."""
    parser = subcommands.add_parser("serve", help="run one service", description="Run one service.")
    services = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    for service, (config, _, text) in SERVICES.items():
        one = services.add_parser(service, help=text, description=f"Run {text}.", allow_abbrev=False)
        add_flags(one, config, service)
        one.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
        one.set_defaults(run=_serve, service=service)


def add_generate(subcommands: Subcommands) -> None:
    """`outrider generate`."""
    parser = subcommands.add_parser(
        "generate",
        allow_abbrev=False,
        help="continue a prompt",
        description="Continue a prompt and stream the text to standard output.",
    )
    add_request_flags(parser)
    add_connection_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print a summary to standard error (default: when it is a terminal)",
    )
    parser.add_argument(
        "--timeline", metavar="FILE", help="write a picture of the steps: .html, .svg or .json"
    )
    parser.set_defaults(run=_later("outrider.cli.generate", "generate"))


def add_timeline(subcommands: Subcommands) -> None:
    """`outrider timeline`."""
    parser = subcommands.add_parser(
        "timeline",
        allow_abbrev=False,
        help="draw the steps of one request",
        description="Run one request, or read a saved one, and draw what draft, wire and target did when.",
    )
    add_request_flags(parser)
    add_connection_flags(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        required=True,
        help=".html (self-contained page), .svg, or .json (Chrome trace: ui.perfetto.dev or chrome://tracing)",
    )
    parser.add_argument("--from-json", metavar="FILE", help="draw a saved .json instead of running a request")
    parser.set_defaults(run=_later("outrider.cli.generate", "timeline"))


def add_bench(subcommands: Subcommands) -> None:
    """`outrider bench`."""
    parser = subcommands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure an endpoint under load",
        usage=bench_flags.USAGE,
        description=bench_flags.DESCRIPTION,
        epilog=bench_flags.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_flags.add_flags(parser)
    parser.set_defaults(run=_later("outrider.cli.bench.command", "bench"))


def add_top(subcommands: Subcommands) -> None:
    """`outrider top`."""
    parser = subcommands.add_parser(
        "top",
        allow_abbrev=False,
        help="watch the services at work",
        description="Show what the services do at the moment, from their Prometheus pages (--metrics-port), "
        "until Ctrl-C: requests, tokens per second, acceptance, drafts, and each replica. `outrider up "
        "--metrics-port 9464` prints the pages of its services.",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="PAGE",
        help="host:port, a URL, or dns:name:port for all that a name resolves to (environment "
        f"OUTRIDER_METRICS, separated by spaces; default {METRICS})",
    )
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help="default 2")
    parser.add_argument("--once", action="store_true", help="print one frame as plain text, and end")
    parser.set_defaults(run=_top, default=METRICS)


def add_plan(subcommands: Subcommands) -> None:
    """`outrider plan`."""
    parser = subcommands.add_parser(
        "plan",
        allow_abbrev=False,
        help="size a pair for a device",
        description="Say what a pair of models needs of a device, from config.json and the headers of its "
        "weights, and print an overlay for Kubernetes. Nothing is loaded or measured.",
    )
    plan_flags.add_flags(parser)
    parser.set_defaults(run=_later("outrider.cli.plan.command", "plan"))


def add_layers(subcommands: Subcommands) -> None:
    """`outrider layers`."""
    parser = subcommands.add_parser(
        "layers",
        allow_abbrev=False,
        help="find the layers that a draft can do without",
        description="Leave out one layer of a model after the other, each time the one that its own texts "
        "miss least, and print acceptance and expected speed-up. Needs no service.",
    )
    layer_search.add_flags(parser)
    parser.set_defaults(run=layer_search.run)


def add_distill(subcommands: Subcommands) -> None:
    """`outrider distill`."""
    parser = subcommands.add_parser(
        "distill",
        allow_abbrev=False,
        help="train a draft on its target's texts",
        description="Train a draft on what the target wrote, from collected tokens or from prompts, and "
        "measure acceptance on texts held out. Needs no service. Ctrl-C stops it; the same command goes on.",
    )
    distill_flags.add_flags(parser)
    parser.set_defaults(run=_later("outrider.cli.distill.command", "distill"))


def add_drafts(subcommands: Subcommands) -> None:
    """`outrider drafts list|promote|demote`."""
    parser = subcommands.add_parser(
        "drafts",
        allow_abbrev=False,
        help="list, promote and demote draft replicas",
        description="Show what draft replicas serve, make a shadow a draft whose proposals are verified, or "
        "the other way round. The replicas are asked directly; all orchestrators see it with their next "
        "probe. After a restart, a replica is what its settings say.",
    )
    drafts.add_commands(parser)


def add_advise(subcommands: Subcommands) -> None:
    """`outrider advise`."""
    parser = subcommands.add_parser(
        "advise",
        allow_abbrev=False,
        help="find the draft to take",
        description="Say which draft a target should have for some traffic, or none, and print the command "
        "that serves it so. Models are measured on this machine's CPU; the services are simulated with their "
        "own scheduling code. Needs no service, and a quiet machine.",
    )
    advise_flags.add_flags(parser)
    parser.set_defaults(run=_advise)


def add_version(subcommands: Subcommands) -> None:
    """`outrider version`."""
    parser = subcommands.add_parser("version", help="print versions", description="Print versions.")
    parser.set_defaults(run=_version)


def _later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """The command of this name in a module that is imported when the command runs."""

    def run(arguments: argparse.Namespace) -> int:
        command: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
        return command(arguments)

    return run


def _serve(arguments: argparse.Namespace) -> int:
    config_type, module, _ = SERVICES[arguments.service]
    resolved = resolve(arguments.service, config_type, arguments, os.environ)
    if arguments.print_config:
        print(resolved.render())
        return 0
    from outrider import process
    from outrider.telemetry.logs import configure_logging

    config = resolved.config
    process.end_with_parent(arguments.parent_pid)
    configure_logging(arguments.service, config.log_level, config.log_format)
    process.run_event_loop(_module(arguments.service, module).run(config))
    return 0


def _module(service: str, name: str) -> Any:
    """The module of a service, or a sentence about what is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        extra = {"gateway": "gateway", "draft": "engine", "verify": "engine"}.get(service)
        if extra is None or error.name is None or error.name.startswith(("outrider", "orchestrator")):
            raise
        raise ConfigError(f"{service} needs {error.name}; pip install 'outrider[{extra}]'") from error


def _up(arguments: argparse.Namespace) -> int:
    resolved = resolve("up", UpConfig, arguments, os.environ)
    if arguments.print_config:
        print(resolved.render())
        return 0
    from outrider.cli.up.command import up

    return up(resolved, arguments.config)


def _top(arguments: argparse.Namespace) -> int:
    try:
        from outrider.cli.top.command import top
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise ConfigError("top needs rich; pip install 'outrider[cli]'") from error

    return top(arguments)


def _advise(arguments: argparse.Namespace) -> int:
    from outrider.cli.advise.command import advise

    try:
        return advise(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("outrider", "orchestrator", "draft_service", "verify_service"):
            raise
        raise ConfigError(f"advise needs {package}; pip install 'outrider[engine,cli]'") from error


def _version(_arguments: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    print(f"outrider {__version__}")
    print(f"python {platform.python_version()}")
    for package in ("grpcio", "protobuf", "torch", "transformers"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} not installed")
    return 0
