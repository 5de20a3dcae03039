"""The flags of `outrider bench`, and the check that they go together."""

from __future__ import annotations

import argparse
import os
import random

from outrider.cli import values
from outrider.cli.bench.arrivals import ArrivalPattern, ClosedLoop, OpenLoop, poisson
from outrider.cli.bench.slo import Slo, parse_slo
from outrider.cli.files import check_output
from outrider.cli.model_flags import add_number
from outrider.cli.request import add_endpoint_flag, add_transport_flags
from outrider.protocol.errors import InvalidRequest

USAGE = "outrider bench [--endpoint HOST:PORT | --openai URL] [FLAG ...]"
DESCRIPTION = """\
Measure how fast an endpoint answers: Outrider's over gRPC, or any server with an OpenAI-compatible API, so
that one tool measures both. Prints a table, and progress to standard error.
"""
EPILOG = """\
examples:
  outrider bench --prompts prompts.json --concurrency 8 --requests 64
  outrider bench --prompts prompts.json --mode off                          the target alone
  outrider bench --request-rate 2 --slo ttft=500ms,tpot=50ms --json out.json
  outrider bench --openai http://127.0.0.1:8000/v1 --chat --prompts chats.jsonl

Latencies are measured at this client. A delivery brings one or several tokens. The exit status is 1 if a
request failed, 2 for wrong flags, 130 after Ctrl-C, which prints the figures so far.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags."""
    _add_target_flags(parser)
    _add_load_flags(parser.add_argument_group("load"))
    _add_prompt_flags(parser.add_argument_group("prompts"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_report_flags(parser.add_argument_group("report"))


def check(arguments: argparse.Namespace) -> None:
    """Check that the flags do not contradict each other.

    Raises:
        InvalidRequest: they do; names the flag that has to change.
    """
    if arguments.openai and arguments.mode:
        raise InvalidRequest(
            "--mode",
            "goes with --endpoint; Outrider's gateway takes "
            """--extra-body '{"speculation": {"mode": "off"}}'""",
        )
    if arguments.extra_body and not arguments.openai:
        raise InvalidRequest("--extra-body", "goes with --openai")
    if (arguments.openai or "").startswith("http:") and (arguments.tls_ca or arguments.tls_cert):
        raise InvalidRequest("--openai", "must begin with https:// where a TLS file is given")
    if arguments.json:
        check_output("--json", arguments.json)


def load_of(arguments: argparse.Namespace, rng: random.Random) -> ArrivalPattern:
    """The load that the flags describe."""
    if arguments.request_rate is not None:
        return OpenLoop(poisson(arguments.request_rate, arguments.requests, rng))
    return ClosedLoop(arguments.concurrency or 1)


def token_of(arguments: argparse.Namespace) -> str:
    """The bearer token; Outrider's own from the environment is never sent to another vendor's server."""
    if arguments.token is not None:
        return str(arguments.token)
    return os.environ.get("OPENAI_API_KEY" if arguments.openai else "OUTRIDER_TOKEN", "")


def _add_target_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    one = group.add_mutually_exclusive_group()
    add_endpoint_flag(one)
    one.add_argument(
        "--openai",
        type=values.url,
        metavar="URL",
        help="an OpenAI-compatible API, such as http://host:8000/v1",
    )
    group.add_argument("--model", default="", metavar="NAME", help="model name; empty: the one served")
    group.add_argument(
        "--token",
        metavar="TOKEN",
        help="bearer token (better: environment OUTRIDER_TOKEN; with --openai OPENAI_API_KEY)",
    )
    add_transport_flags(group)


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency", type=values.count, metavar="N", help="requests running at any time (default 1)"
    )
    kind.add_argument(
        "--request-rate",
        type=values.rate,
        metavar="R",
        help="requests per second on average, however many are running: Poisson arrivals; inf: all at once",
    )
    add_number(group, "--requests", values.count, 32, "requests that are measured")
    add_number(
        group, "--warm-up", values.whole, 1, "requests sent first, with other prompts, that do not count"
    )
    group.add_argument(
        "--seed",
        type=values.whole,
        metavar="N",
        help="of arrivals and random prompts (default 0); when given, also of request i's sampling: N + i",
    )


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON list, or lines of a .jsonl file: texts, lists of token ids, or lists of messages",
    )
    random = "random token ids, with --openai or --chat words, which tell little about acceptance"
    add_number(kind, "--random-prompt-tokens", values.count, 128, random)


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chat", action="store_true", help="send conversations; texts are the user's message")
    add_number(group, "--max-tokens", values.count, 128, "most new tokens")
    add_number(group, "--temperature", float, 0.0, "0 is greedy")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    group.add_argument(
        "--mode", choices=("auto", "sequential", "off"), help="of speculation, over gRPC (default auto)"
    )
    group.add_argument(
        "--extra-body",
        type=values.json_object,
        default={},
        metavar="JSON",
        help="more fields of each request's body, with --openai; null takes one of ours away",
    )


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        type=_slo,
        default=(),
        metavar="BOUNDS",
        help="report goodput under bounds on ttft, tpot and e2e, such as ttft=500ms,tpot=50ms,e2e=10s",
    )
    group.add_argument(
        "--json", default="", metavar="FILE", help="write everything, each request's figures too"
    )


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
