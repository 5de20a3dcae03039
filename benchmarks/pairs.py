"""Which models are compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.config import Weights
from outrider.engine.quantization.rounding import BITS
from scripts.local_services import DRAFT, TARGET, deep_target, widened_target


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a draft with the same vocabulary, and the arithmetic of both."""

    name: str
    target: Path
    draft: Path
    dtype: Literal["bfloat16", "float16", "float32"]
    weights: Weights = "full"
    """How the target's are rounded."""


TARGETS: dict[str, Callable[[], Path]] = {"wide": widened_target, "deep": deep_target, "demo": lambda: TARGET}
"""Pairs by name, and what makes their target."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `load_pair` reads."""
    parser.add_argument(
        "--pair",
        choices=TARGETS,
        default="wide",
        help="the demo pair, its target widened to 216 M parameters, embedded in 306 M, or as it is (5.5 M)",
    )
    parser.add_argument("--target", type=Path, help="another target, a folder")
    parser.add_argument("--draft", type=Path, default=DRAFT, help="its draft, a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--weights", choices=("full", *BITS), default="full", help="of the target")


def load_pair(flags: argparse.Namespace) -> Pair:
    """The pair that the flags name."""
    if flags.target is not None:
        return Pair(flags.target.name, flags.target, flags.draft, flags.dtype, flags.weights)
    target = TARGETS[flags.pair]()
    return Pair(f"demo-{flags.pair}", target.resolve(), flags.draft.resolve(), flags.dtype, flags.weights)
