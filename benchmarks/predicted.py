"""Predicted output: tokens per step where the caller sends a text that the answer resembles.

    python -m benchmarks.predicted --temperatures 0 0.7 1

The target's own answer to a prompt is the edited file; the file before the edit, which is sent as the
prediction, is that answer with passages replaced, inserted and deleted. So the share that is edited is known,
and the answers are those of a real model. Every answer has to be that of MODE_OFF.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from benchmarks import machine, pairs, workload
from benchmarks.answers import Answers, client_of
from benchmarks.flags import command, new_parser
from benchmarks.pairs import load_pair
from benchmarks.workload import SEED, Tokens, load_workload
from outrider.client import Client
from scripts.console import progress, run

LONGEST_EDIT = 5
HEADING = "\n   T  arm             tokens/step  decode tokens/s  accepted  rejected"


def main() -> int:
    """Measure and print."""
    flags = parse()
    pair = load_pair(flags)
    work = load_workload(flags, pair.target)
    print(machine.lines(machine.describe() | {"command": command("predicted")}))
    print(HEADING)
    with client_of(pair) as client:
        for temperature in flags.temperatures:
            for arm, row in measure(client, work.prompts[: flags.requests], flags, temperature).items():
                print(line(temperature, arm, row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    workload.add_flags(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--edited", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.2])
    parser.add_argument("--requests", type=int, default=12, help="prompts")
    return parser.parse_args()


def measure(
    client: Client, prompts: Sequence[Tokens], flags: argparse.Namespace, temperature: float
) -> dict[str, Answers]:
    """All arms in turn on one prompt after the other."""
    shares = {f"edited {share:.0%}": share for share in flags.edited}
    rows = {arm: Answers() for arm in ("off", "no prediction", *shares)}

    def ask(arm: str, prompt: Tokens, mode: str, prediction: Sequence[int] = ()) -> tuple[int, ...]:
        result = client.generate(
            prompt,
            mode="off" if mode == "off" else "auto",
            prediction=prediction,
            temperature=temperature,
            seed=SEED,
            max_tokens=flags.tokens,
            ignore_eos=True,
        )
        rows[arm].add(result)
        return result.token_ids

    for index, prompt in enumerate(prompts):
        progress(f"T = {temperature:g}, prompt {index + 1} of {len(prompts)}")
        answer = ask("off", prompt, "off")
        ask("no prediction", prompt, "auto")
        for arm, share in shares.items():
            ask(arm, prompt, "auto", edited(answer, share, seed=index))
    for arm, row in rows.items():
        same = sum(ours == theirs for ours, theirs in zip(row.texts, rows["off"].texts, strict=True))
        if same < len(prompts):
            print(f"      {arm}: {len(prompts) - same} answers differ from MODE_OFF; see docs/exactness.md")
    return rows


def edited(tokens: Sequence[int], share: float, seed: int) -> list[int]:
    """A text of which about this share of the tokens is not in `tokens`, or the other way round."""
    source, found, place = random.Random(seed), list[int](), 0
    while place < len(tokens):
        if source.random() < 2 * share / (LONGEST_EDIT + 1):
            length = source.randint(1, LONGEST_EDIT)
            kind = source.choice(("replace", "insert", "delete"))
            found += [] if kind == "delete" else source.choices(tokens, k=length)
            place += 0 if kind == "insert" else length
        found += tokens[place : place + 1]
        place += 1
    return found


def line(temperature: float, arm: str, row: Answers) -> str:
    """One row of the table."""
    usages = [one.usage for one in row.found]
    accepted = sum(usage.accepted_prediction_tokens for usage in usages)
    rejected = sum(usage.rejected_prediction_tokens for usage in usages)
    return f"{temperature:4g}  {arm:15} {row.length:11.2f}{row.rate:17.1f}{accepted:10}{rejected:10}"


if __name__ == "__main__":
    run(main)
