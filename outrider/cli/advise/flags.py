"""The flags of `outrider advise`."""

from __future__ import annotations

import argparse

from outrider.cli import values
from outrider.cli.model_flags import add_dtype, add_folder, add_traffic_flags, add_weights

SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_SESSIONS = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the models, the traffic and the output."""
    add_folder(parser, "--target", "folder or hub id of the target")
    parser.add_argument(
        "--draft",
        required=True,
        action="append",
        metavar="DRAFT",
        help="as in `outrider up`: folder or hub id of a draft model, the target itself, or lookup; may be "
        "given several times. The target without a draft is always compared",
    )
    parser.add_argument(
        "--draft-skip-layers",
        type=values.layers,
        action="append",
        default=[],
        metavar="LAYERS",
        help="layers to leave out of the target as its own draft, such as 4-9; may be given several times",
    )
    add_weights(parser, "--draft-weights", "weights of all draft models")
    add_traffic_flags(parser, tokens=128)
    parser.add_argument(
        "--sessions",
        type=_sessions,
        default=SESSIONS,
        metavar="N,N",
        help=f"numbers of concurrent sessions to simulate (default {','.join(map(str, SESSIONS))})",
    )
    add_dtype(parser, "arithmetic")
    parser.add_argument("--json", metavar="FILE", help="write all figures")


def _sessions(text: str) -> tuple[int, ...]:
    counts = sorted({values.count(part.strip()) for part in text.split(",")})
    if counts[-1] > MAX_SESSIONS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_SESSIONS}, not {counts[-1]}")
    return tuple(counts)
