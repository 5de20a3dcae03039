"""The flags of `outrider distill`."""

from __future__ import annotations

import argparse

from outrider.cli import values


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which pair, from what, for how long."""
    parser.add_argument("--target", required=True, metavar="DIR", help="folder or hub id of the target")
    parser.add_argument(
        "--draft", required=True, metavar="DIR", help="folder or hub id of the draft to train"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the trained draft")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--collected",
        metavar="PATH",
        help="folder or file of tokens that `--collect` of the orchestrator kept",
    )
    source.add_argument(
        "--prompts", metavar="FILE", help="JSON list or .jsonl of prompts, which the target continues first"
    )
    _add_data_flags(parser.add_argument_group("data"))
    _add_training_flags(parser.add_argument_group("training"))


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--task", default="", metavar="LABEL", help="with --collected: this traffic label alone"
    )
    group.add_argument(
        "--answers",
        type=values.whole,
        metavar="N",
        help="texts that the target writes after each prompt (1); with --collected, after each collected "
        "prompt, beside the collected texts (0)",
    )
    group.add_argument(
        "--tokens",
        type=values.count,
        default=256,
        metavar="N",
        help="of each text that the target writes (256)",
    )
    group.add_argument(
        "--temperature",
        type=values.not_negative,
        default=0.0,
        metavar="X",
        help="of the traffic: of the texts that the target writes, and where acceptance is measured (0)",
    )
    group.add_argument(
        "--held-out",
        type=values.part,
        default=0.1,
        metavar="X",
        help="share of the prompts to measure on (0.1)",
    )
    group.add_argument(
        "--held-out-tokens", type=values.count, default=8192, metavar="N", help="tokens to measure on (8192)"
    )


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--passes", type=values.rate, default=3.0, metavar="X", help="over the data (3)")
    group.add_argument(
        "--minutes",
        type=values.not_negative,
        default=0.0,
        metavar="X",
        help="longest training; 0: no limit (0)",
    )
    group.add_argument("--batch", type=values.count, default=16, metavar="N", help="windows per step (16)")
    group.add_argument(
        "--window", type=values.at_least(2), default=256, metavar="N", help="tokens per window (256)"
    )
    group.add_argument(
        "--lora",
        type=values.count,
        default=0,
        metavar="RANK",
        help="train updates of this rank of the linear layers, which take less memory, not all weights",
    )
    group.add_argument(
        "--rate",
        type=values.not_negative,
        default=0.0,
        metavar="X",
        help="learning rate; 0: by the draft's width, and ten times as high with --lora (0)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help="the target's arithmetic: auto (float32 on the CPU), float32 or bfloat16",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--threads", type=values.count, default=1, metavar="N", help="torch threads on the CPU (1)"
    )
