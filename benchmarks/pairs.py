"""The pairs of models that are compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.config import Weights
from outrider.engine.quantization.rounding import BITS
from scripts.local_services import DRAFT, TARGET, large_draft, large_target, larger_target, widened_target


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a draft with the same vocabulary, and the arithmetic of both."""

    name: str
    target: Path
    draft: Path
    dtype: Literal["bfloat16", "float16", "float32"]
    weights: Weights = "full"
    """How the target's weights are rounded."""


PAIRS: dict[str, Callable[[], tuple[Path, Path]]] = {
    "wide": lambda: (widened_target(), DRAFT),
    "large": lambda: (large_target(), large_draft()),
    "larger": lambda: (larger_target(), large_draft()),
    "demo": lambda: (TARGET, DRAFT),
}
"""Functions that make the target and the draft of a pair, by the pair's name."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `load_pair` reads."""
    parser.add_argument(
        "--pair",
        choices=PAIRS,
        default="wide",
        help="the demo pair: its target widened to 216 M parameters; target embedded in a model of 1,047 M "
        "or 2,919 M, and draft in one of 109 M; or as it is (5.5 M)",
    )
    parser.add_argument("--target", type=Path, help="another target, a folder")
    parser.add_argument("--draft", type=Path, help="another draft, a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--weights", choices=("full", *BITS), default="full", help="of the target")


def load_pair(flags: argparse.Namespace) -> Pair:
    """The pair that the flags name."""
    if flags.target is not None:
        return Pair(flags.target.name, flags.target, flags.draft or DRAFT, flags.dtype, flags.weights)
    target, draft = PAIRS[flags.pair]()
    draft = flags.draft or draft
    return Pair(f"demo-{flags.pair}", target.resolve(), draft.resolve(), flags.dtype, flags.weights)
