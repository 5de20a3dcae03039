"""The flags of `outrider distill`."""

from __future__ import annotations

import argparse

from outrider.cli import values
from outrider.cli.model_flags import add_folder, add_machine_flags, add_number


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the pair, the texts and the length of the training."""
    add_folder(parser, "--target", "folder or hub id of the target")
    add_folder(parser, "--draft", "folder or hub id of the draft to train")
    add_folder(parser, "--out", "new folder for the trained draft")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--collected",
        metavar="PATH",
        help="folder or file of tokens that the orchestrator kept (`--collect`)",
    )
    source.add_argument(
        "--prompts", metavar="FILE", help="JSON list or .jsonl of prompts, which the target continues first"
    )
    _add_data_flags(parser.add_argument_group("data"))
    _add_training_flags(parser.add_argument_group("training"))


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--task", default="", metavar="LABEL", help="with --collected: only tokens with this traffic label"
    )
    group.add_argument(
        "--answers",
        type=values.whole,
        metavar="N",
        help="texts that the target writes after each prompt (default 1); with --collected, after each "
        "collected prompt, in addition to the collected texts (default 0)",
    )
    add_number(group, "--tokens", values.count, 256, "most tokens of each text that the target writes")
    add_number(
        group,
        "--temperature",
        values.not_negative,
        0.0,
        "temperature at which the target writes and the acceptance is measured",
    )
    add_number(group, "--held-out", values.part, 0.1, "share of the prompts to measure on")
    add_number(group, "--held-out-tokens", values.count, 8192, "tokens to measure on")


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    add_number(group, "--passes", values.positive, 3.0, "over the data")
    add_number(group, "--minutes", values.not_negative, 0.0, "longest training; 0: no limit")
    add_number(group, "--batch", values.count, 16, "windows per step")
    add_number(group, "--window", values.at_least(2), 256, "tokens per window")
    group.add_argument(
        "--lora",
        type=values.count,
        default=0,
        metavar="RANK",
        help="train updates of this rank for the linear layers instead of all weights; takes less memory",
    )
    add_number(group, "--rate", values.not_negative, 0.0, "learning rate; 0: by the draft's width and --lora")
    add_machine_flags(group, "the target's arithmetic, where auto is float32 on the CPU")
