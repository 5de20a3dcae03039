"""The subcommands, their flags, and the function that each runs, which is imported only then."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.cli import drafts, layer_search, values
from outrider.cli.advise import flags as advise_flags
from outrider.cli.bench import flags as bench_flags
from outrider.cli.distill import flags as distill_flags
from outrider.cli.plan import flags as plan_flags
from outrider.cli.request import add_connection_flags, add_request_flags
from outrider.cli.serve import add_services
from outrider.cli.settings import add_flags
from outrider.cli.up.plan import UpConfig

METRICS = "127.0.0.1:9464"
"""Default address at which `outrider top` reads an orchestrator's page."""


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    description: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: str
    """`module:function`; the function gets the arguments and returns the exit status."""
    extra: str = ""
    """Optional dependencies of the package that it needs, as pip names them."""
    looks: Mapping[str, Any] = field(default_factory=dict)
    """More arguments for the `argparse` parser, which change how its help looks."""

    def add_to(self, subcommands: Any) -> None:
        """Add its parser; `subcommands` are those of argparse, whose type has no public name."""
        parser = subcommands.add_parser(
            self.name, help=self.help, description=self.description, allow_abbrev=False, **self.looks
        )
        parser.set_defaults(run=self.run, extra=self.extra)
        self.add_flags(parser)


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add_request_flags(parser)
    add_connection_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log probabilities of each token and of this many alternatives",
    )
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print a summary to standard error (default: when it is a terminal)",
    )


def _add_timeline_flags(parser: argparse.ArgumentParser) -> None:
    add_request_flags(parser)
    add_connection_flags(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        required=True,
        help=".html (self-contained page), .svg, or .json (Chrome trace: ui.perfetto.dev or chrome://tracing)",
    )


def _add_top_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        nargs="+",
        action="extend",
        metavar="PAGE",
        help="host:port, a URL, or dns:name:port for all that a name resolves to (environment "
        f"OUTRIDER_METRICS, separated by spaces; default {METRICS})",
    )
    parser.add_argument("--interval", type=values.seconds, default=2.0, metavar="SECONDS", help="default 2")
    parser.add_argument("--once", action="store_true", help="print one frame as plain text, and end")


COMMANDS = (
    Command(
        "up",
        "run all services on this machine",
        "Run the orchestrator and its replicas on this machine, each as its own process, until Ctrl-C. A "
        "replica that crashes is restarted. Other settings of the services come from the environment or the "
        "file's tables [orchestrator], [draft], [verify] and [gateway].",
        partial(add_flags, settings=UpConfig, table="up"),
        "outrider.cli.up.command:up",
    ),
    Command("serve", "run one service", "Run one service.", add_services, "outrider.cli.serve:serve"),
    Command(
        "generate",
        "continue a prompt",
        "Continue a prompt and stream the text to standard output.",
        _add_generate_flags,
        "outrider.cli.generate:generate",
    ),
    Command(
        "timeline",
        "draw the steps of one request",
        "Run one request, and draw when draft, wire and target did what.",
        _add_timeline_flags,
        "outrider.cli.generate:timeline",
    ),
    Command(
        "bench",
        "measure an endpoint under load",
        bench_flags.DESCRIPTION,
        bench_flags.add_flags,
        "outrider.cli.bench.command:bench",
        extra="cli",
        looks={
            "usage": bench_flags.USAGE,
            "epilog": bench_flags.EPILOG,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        },
    ),
    Command(
        "top",
        "watch the services at work",
        "Show what the services do at the moment, from their Prometheus pages (--metrics-port), until "
        "Ctrl-C: requests, tokens per second, acceptance, drafts, and each replica. `outrider up "
        "--metrics-port 9464` prints the pages of its services.",
        _add_top_flags,
        "outrider.cli.top.command:top",
        extra="cli",
    ),
    Command(
        "plan",
        "size a pair for a device",
        "Say what a pair of models needs of a device, from config.json and the headers of its weights, and "
        "print an overlay for Kubernetes. Nothing is loaded or measured.",
        plan_flags.add_flags,
        "outrider.cli.plan.command:plan",
        extra="engine",
    ),
    Command(
        "layers",
        "find the layers that a draft can do without",
        "Leave out one layer of a model after the other, each time the one that its own texts miss least, "
        "and print acceptance and expected speed-up. Needs no service.",
        layer_search.add_flags,
        "outrider.cli.layer_search:run",
        extra="engine",
    ),
    Command(
        "distill",
        "train a draft on its target's texts",
        "Train a draft on what the target wrote, from collected tokens or from prompts, and measure "
        "acceptance on texts held out. Needs no service. Ctrl-C stops it; the same command goes on.",
        distill_flags.add_flags,
        "outrider.cli.distill.command:distill",
        extra="engine",
    ),
    Command(
        "drafts",
        "list, promote and demote draft replicas",
        "Show what draft replicas serve, make a shadow a draft whose proposals are verified, or the other "
        "way round. The replicas are asked directly; all orchestrators see it with their next probe. After a "
        "restart, a replica is what its settings say.",
        drafts.add_commands,
        "outrider.cli.drafts:run",
    ),
    Command(
        "advise",
        "find the draft to take",
        "Say which draft, if any, a target should have for given traffic, and print the command that serves "
        "the target with it. Models are measured on this machine's CPU; the services are simulated with "
        "their own scheduling code. Needs no service, and a quiet machine.",
        advise_flags.add_flags,
        "outrider.cli.advise.command:advise",
        extra="engine,cli",
    ),
)
