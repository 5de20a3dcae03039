"""`outrider serve`: one service in this process."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from importlib import import_module

from outrider.cli.settings import add_flags, resolve
from outrider.config import DraftConfig, GatewayConfig, OrchestratorConfig, ProcessConfig, VerifyConfig


@dataclass(frozen=True, slots=True)
class ServedProgram:
    """A service that can be run."""

    config: type[ProcessConfig]
    module: str
    """Its `run(config)` serves until a signal ends the process."""
    help: str
    extra: str = ""
    """Optional dependencies of the package that it needs."""


SERVICES = {
    "orchestrator": ServedProgram(
        OrchestratorConfig, "orchestrator.main", "the public service: requests in, text out"
    ),
    "draft": ServedProgram(
        DraftConfig, "draft_service.main", "a draft replica: proposes tokens", extra="engine"
    ),
    "verify": ServedProgram(
        VerifyConfig, "verify_service.main", "a verify replica: runs the target model", extra="engine"
    ),
    "gateway": ServedProgram(
        GatewayConfig,
        "orchestrator.gateway.main",
        "the OpenAI API over HTTP, before orchestrators",
        extra="gateway",
    ),
}


def add_services(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each service, with its settings as flags."""
    services = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    for name, service in SERVICES.items():
        one = services.add_parser(
            name, help=service.help, description=f"Run {service.help}.", allow_abbrev=False
        )
        add_flags(one, service.config, name)
        one.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
        one.set_defaults(service=name, extra=service.extra)


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: a setting is wrong.
        OSError: this process may have too few threads or files.
    """
    service = SERVICES[arguments.service]
    resolved = resolve(arguments.service, service.config, arguments, os.environ)
    if arguments.print_config:
        print(resolved.render())
        return 0
    from outrider import open_files, process, threads
    from outrider.telemetry.logs import configure_logging

    config = resolved.config
    process.end_with_parent(arguments.parent_pid)
    threads.check_threads()
    configure_logging(arguments.service, config.log_level, config.log_format)
    open_files.allow_files()
    process.run_event_loop(import_module(service.module).run(config))
    process.end_during_load()
    return 0
