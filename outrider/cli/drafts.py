"""`outrider drafts`: what draft replicas serve, and which of them are shadows."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from outrider.cli.request import add_transport_flags, endpoint_of
from outrider.protocol.errors import DeadlineExceeded, InternalError, Unavailable

if TYPE_CHECKING:
    from outrider.protocol.messages import ModelInfo

HEADING = f"{'address':24}{'version':10}{'role':10}{'sessions':>9}  model"
ASK_SECONDS = 5.0
COMMANDS = {
    "list": ("show what replicas serve", None),
    "promote": ("have a shadow's proposals verified from now on", False),
    "demote": ("make a replica a shadow; its sessions move to other drafts", True),
}
"""The help of each command, and whether the replicas are shadows after it; None: it changes nothing."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """`list`, `promote` and `demote`, each with addresses."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, shadow) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
        one.add_argument("replicas", type=endpoint_of, nargs="+", metavar="HOST:PORT", help="draft replicas")
        add_transport_flags(one.add_argument_group("connection"), seconds=ASK_SECONDS)
        one.set_defaults(shadow=shadow)


def run(arguments: argparse.Namespace) -> int:
    """Query or change each replica, and print what it serves afterwards.

    Raises:
        OutriderError: a replica cannot be reached, or refuses; those named before it have been changed.
    """
    heading = f"{HEADING}\n"
    for endpoint in arguments.replicas:
        row = _row(endpoint, asyncio.run(_ask(endpoint, arguments)))
        print(f"{heading}{row}", flush=True)
        heading = ""
    return 0


async def _ask(endpoint: str, arguments: argparse.Namespace) -> ModelInfo:
    from outrider.client.wire import in_plain_words
    from outrider.rpc.channels import open_channel
    from outrider.rpc.draft_admin import draft_info, set_shadow
    from outrider.rpc.tls import client_certificates

    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    try:
        async with open_channel(endpoint, certificates=client_certificates(*files, names="tls")) as channel:
            if arguments.shadow is None:
                return await draft_info(channel, arguments.timeout)
            return await set_shadow(channel, arguments.shadow, "", arguments.timeout)
    except (DeadlineExceeded, InternalError, Unavailable) as error:
        raise in_plain_words(error, endpoint, "a draft replica", "a draft replica's port") from error


def _row(endpoint: str, info: ModelInfo) -> str:
    role = "shadow" if info.shadow else "serving"
    return f"{endpoint:24}{info.draft_name:10}{role:10}{info.sessions:9}  {info.model}"
