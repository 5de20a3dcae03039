"""The `outrider` command: parses arguments, runs a subcommand, turns errors into one sentence."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# gRPC's core writes its own lines to standard error unless told otherwise before it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from outrider import __version__
from outrider.cli.commands import COMMANDS
from outrider.cli.files import temporary_folder
from outrider.cli.mistakes import in_flags, in_plain_words, unknown_arguments
from outrider.out_of_memory import lacks_memory, problem_of
from outrider.output import drop_output
from outrider.protocol.errors import ConfigError, InvalidRequest, OutriderError, Unauthenticated, UnknownModel
from outrider.threads import NO_THREAD

ASKED_WRONGLY = (ConfigError, InvalidRequest, UnknownModel, Unauthenticated)
"""Errors that a retry with the same arguments cannot mend."""
OURS = ("outrider", "orchestrator", "draft_service", "verify_service", "simulator")
NO_ROOM = {
    errno.ENOSPC: "no space is left where the output goes; make room there",
    errno.EMFILE: "this process may open no more files; raise the limit (ulimit -n)",
    errno.EAGAIN: "no more processes or threads can be started; raise the limit (ulimit -u), or end others",
    errno.ENOMEM: "this machine has no memory left; end other processes",
}
"""What to do about errors of the operating system that are not ours."""
ENGINE = "engine"
"""The extra of commands that import torch."""
HIGHEST_STREAM = 2
"""Number of standard error; standard input and output are 0 and 1."""
DESCRIPTION = """\
Serve a large language model faster than it can run by itself: a small draft model proposes tokens on
its own processor, the target model verifies them on another, and the output is exactly the target's.
"""
EXAMPLES = """\
examples:
  outrider up --target models/target --draft models/draft     start everything on this machine
  outrider generate "def fibonacci(n):" --max-tokens 64       stream a completion
  outrider timeline "def fibonacci(n):" --output steps.html   picture of its steps
  outrider bench --concurrency 8 --requests 64                measure it under load
  outrider top --metrics 127.0.0.1:9464                       what the services do at the moment
  outrider plan --target DIR --draft DIR --gpu h100           what fits, and an overlay for Kubernetes
  outrider advise --target DIR --draft DIR --draft lookup --prompts FILE   which draft to take
  outrider serve verify --model models/target --print-config  every setting and its source
"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage, which may be longer than a screen; so do the parsers
    of subcommands. Help that cannot be written is an error, which argparse ignores."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"outrider: {in_plain_words(message)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 (failed), 2 (asked for wrongly), 130 (Ctrl-C)."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 lacks most characters
    try:
        return _parse_and_run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `outrider generate ... | head`
        drop_output()
        return 1
    except (MemoryError, OSError, RuntimeError) as error:
        lack = _lack(error)
        if lack not in NO_ROOM and not lacks_memory(error):
            raise
        if lack == errno.ENOSPC:
            drop_output()
        print(f"outrider: {NO_ROOM.get(lack) or problem_of(error)}", file=sys.stderr)
        return 1


def _parse_and_run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        given = sys.argv[1:] if arguments is None else arguments
        print(f"outrider: {unknown_arguments(parser, given, unknown)}", file=sys.stderr)
        return 2
    try:
        return _run(parsed)
    except OutriderError as error:
        print(f"outrider: {in_flags(error, parsed)}", file=sys.stderr)
        return 2 if isinstance(error, ASKED_WRONGLY) else 1


def _lack(error: Exception) -> int:
    """The system's number for what is lacking; 0 if that is unknown."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno or 0
    return errno.EAGAIN if NO_THREAD in str(error) else 0


def _open_closed_streams() -> None:
    """Open standard streams that the shell closed, as in `outrider generate ... >&-`, to the null device.
    Otherwise the next sockets get their numbers, and a child takes those sockets for its own streams."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= HIGHEST_STREAM:
        pass
    os.close(opened)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _run(arguments: argparse.Namespace) -> int:
    """Import what the command needs, and run it."""
    module, _, name = arguments.run.partition(":")
    if ENGINE in arguments.extra.split(","):
        temporary_folder().cleanup()  # torch needs one, and would say so by a traceback
    try:
        status: int = getattr(import_module(module), name)(arguments)
        sys.stdout.flush()  # output that cannot be written fails here, not at Python's exit
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not arguments.extra or package in OURS:
            raise
        raise ConfigError(f"this needs {package}; pip install 'outrider[{arguments.extra}]'") from error
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="outrider",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(subcommands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
