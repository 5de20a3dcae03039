"""`outrider drafts`: what draft replicas serve, and which of them are shadows."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from outrider.cli.request import add_transport_flags, tls_of

if TYPE_CHECKING:
    from outrider.protocol.messages import ModelInfo

HEADING = f"{'address':24}{'version':10}{'role':10}{'sessions':>9}  model"
COMMANDS = {
    "list": ("show what replicas serve", None),
    "promote": ("have a shadow's proposals verified from now on", False),
    "demote": ("make a replica a shadow; its sessions move to other drafts", True),
}
"""What each does, and whether the replicas are shadows then."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """`list`, `promote` and `demote`, each with addresses."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, shadow) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
        one.add_argument("replicas", nargs="+", metavar="HOST:PORT", help="draft replicas")
        if shadow is not None:
            one.add_argument(
                "--version-of-weights",
                default="",
                metavar="X",
                help="refuse replicas that have other weights",
            )
        add_transport_flags(one.add_argument_group("connection"))
        one.set_defaults(shadow=shadow)


def run(arguments: argparse.Namespace) -> int:
    """Ask or tell each replica, and print what it serves then.

    Raises:
        OutriderError: a replica cannot be reached, or refuses; those before it have done what was asked.
    """
    print(HEADING)
    for endpoint in arguments.replicas:
        print(_row(endpoint, asyncio.run(_ask(endpoint, arguments))), flush=True)
    return 0


async def _ask(endpoint: str, arguments: argparse.Namespace) -> ModelInfo:
    from outrider.rpc.channels import open_channel
    from outrider.rpc.draft_admin import draft_info, set_shadow

    async with open_channel(endpoint, **tls_of(arguments)) as channel, asyncio.timeout(arguments.timeout):
        if arguments.shadow is None:
            return await draft_info(channel)
        return await set_shadow(channel, arguments.shadow, arguments.version_of_weights)


def _row(endpoint: str, info: ModelInfo) -> str:
    role = "shadow" if info.shadow else "serving"
    return f"{endpoint:24}{info.draft_name:10}{role:10}{info.sessions:9}  {info.model}"
