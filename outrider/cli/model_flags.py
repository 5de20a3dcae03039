"""Flags that several commands on models have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import get_args

from outrider.cli import values
from outrider.config import MAX_THREADS, Dtype, Weights

Group = argparse.ArgumentParser | argparse._ArgumentGroup
Number = int | float


def add_number(group: Group, flag: str, kind: Callable[[str], Number], default: Number, help: str) -> None:
    """Add a flag for a number with a default, which the help names."""
    metavar = "N" if isinstance(default, int) else "X"
    group.add_argument(
        flag, type=kind, default=default, metavar=metavar, help=f"{help} (default {default:g})"
    )


def add_folder(group: Group, flag: str, help: str) -> None:
    """Add a required flag for a folder or another name of a model."""
    group.add_argument(flag, required=True, metavar="DIR", help=help)


def add_traffic_flags(group: Group, tokens: int) -> None:
    """Add the flags for what a target is asked: prompts, and new tokens after each, by default `tokens`."""
    group.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSON list or .jsonl of prompts: texts, token ids, or objects with `prompt` and `task`",
    )
    add_number(group, "--max-prompts", values.count, 16, "only the first N prompts")
    add_number(group, "--tokens", values.count, tokens, "new tokens after each")
    add_number(group, "--temperature", values.not_negative, 0.0, "of the traffic")


def add_dtype(group: Group, what: str) -> None:
    """Add the flag for the arithmetic of a model."""
    group.add_argument("--dtype", choices=get_args(Dtype), default="auto", help=f"{what} (default auto)")


def add_weights(group: Group, flag: str, what: str) -> None:
    """Add a flag for the rounding of a model's weights."""
    group.add_argument(flag, choices=get_args(Weights), default="full", help=f"{what} (default full)")


def add_machine_flags(group: Group, dtype: str = "arithmetic of the model") -> None:
    """Add the flags for arithmetic, device and threads."""
    add_dtype(group, dtype)
    group.add_argument(
        "--device", type=values.device, default="auto", help="auto (default), cpu, cuda or cuda:N"
    )
    add_number(
        group, "--threads", values.at_least(0, MAX_THREADS), 0, "threads on the CPU; 0: one for each core"
    )
