"""The flags of `outrider plan`."""

from __future__ import annotations

import argparse
from typing import get_args

from outrider.cli import values
from outrider.cli.model_flags import add_dtype, add_folder, add_weights
from outrider.config import KvDtype

MAX_SESSIONS = 10**9
"""Most sessions: each may need a replica of its own, and Kubernetes counts replicas in 32 bits."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the pair, the device, and the sessions that are wanted."""
    add_folder(parser, "--target", "folder of the target")
    parser.add_argument(
        "--draft",
        action="append",
        required=True,
        metavar="DIR",
        help="folder of the draft; plan several apart",
    )
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="such as h100, a100-80gb, l4; or cpu: this machine"
    )
    add_dtype(parser, "arithmetic of both models; auto: each one's own")
    for prefix, whose in (("--", "target"), ("--draft-", "draft")):
        add_weights(parser, f"{prefix}weights", f"weights of the {whose}, rounded at load unless full")
        parser.add_argument(
            f"{prefix}kv-dtype",
            choices=get_args(KvDtype),
            default="auto",
            help=f"keys and values of the {whose}: in 8 bits (fp8), or in its dtype (auto)",
        )
    parser.add_argument(
        "--context",
        type=values.count,
        default=0,
        metavar="N",
        help="tokens of a session, prompt and output (default: the target's limit)",
    )
    parser.add_argument(
        "--sessions",
        type=values.at_least(1, MAX_SESSIONS),
        metavar="N",
        help="sessions at once, over all replicas (default: as many as fit on one replica)",
    )
    parser.add_argument(
        "--memory", type=values.positive, metavar="GB", help="of a device that is not in the table"
    )
    parser.add_argument("--bandwidth", type=values.positive, metavar="GB/S", help="likewise")
