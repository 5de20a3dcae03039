"""Measures what a grammar costs and what it brings: acceptance length and tokens per second.

    python -m benchmarks.structured --pair demo          # one request at a time
    python -m benchmarks.structured --temperature 1 --requests 32

    free                no constraint
    schema              the text is JSON under a schema with names that are known beforehand
    open                the text is some JSON object of four properties or more: little is known

Each alone (off) and with a draft. The arms take turns, request by request; seconds count from the first token
to the last. Medians over the requests.
"""

from __future__ import annotations

import argparse
import math
import statistics

from benchmarks import machine, pairs
from benchmarks.answers import Answers, client_of
from benchmarks.pairs import load_pair
from outrider.client import Client
from outrider.client.request import Mode, Options
from scripts.console import new_parser, run

PROMPT = "# {index}: a person as JSON\nperson = "
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2025},
        "newsletter_subscribed": {"type": "boolean"},
        "favourite_colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue", "yellow"]},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["first_name", "last_name", "year_of_birth", "newsletter_subscribed", "favourite_colours"],
    "additionalProperties": False,
}
TEXTS: dict[str, Options] = {
    "free": {"ignore_eos": True},
    "schema": {"json_schema": SCHEMA},
    "open": {"json_schema": {"type": "object", "minProperties": 4}},
}
ARMS: tuple[Mode, ...] = ("off", "auto")


def main() -> int:
    """Measure and print."""
    flags = _flags()
    pair = load_pair(flags)
    print(machine.lines(machine.describe()) + "\n")
    with client_of(pair) as client:
        found = _measure(client, flags)
    _print(found)
    return 0 if _equal(found) else 1


def _measure(client: Client, flags: argparse.Namespace) -> dict[tuple[str, Mode], Answers]:
    found = {(text, arm): Answers() for text in TEXTS for arm in ARMS}
    for index in range(-flags.warm_up, flags.requests):
        for (text, arm), figures in found.items():
            options = TEXTS[text] | Options(mode=arm, task=text, seed=index + 1000)
            options |= Options(max_tokens=flags.tokens, temperature=flags.temperature)
            answer = client.generate(PROMPT.format(index=index), **options)
            if index >= 0:
                figures.add(answer)
    return found


def _print(found: dict[tuple[str, Mode], Answers]) -> None:
    print(f"{'text':8}{'arm':6}{'acceptance length':>18}{'tokens/s':>10}{'of off':>8}{'tokens':>8}")
    for (text, arm), figures in found.items():
        rate, alone = (_rate(each) for each in (figures, found[text, "off"]))
        length = statistics.median(one.end.speculation["acceptance_length"] for one in figures.found)
        tokens = statistics.mean(map(len, figures.texts))
        print(f"{text:8}{arm:6}{length:18.2f}{rate:10.1f}{rate / alone:8.2f}{tokens:8.1f}")


def _rate(answers: Answers) -> float:
    """Median of the tokens per second; not a number where all texts came in one step."""
    rates = [rate for one in answers.found if (rate := Answers([one]).rate)]
    return statistics.median(rates) if rates else math.nan


def _equal(found: dict[tuple[str, Mode], Answers]) -> bool:
    """Whether all arms have equal texts; with library kernels in bfloat16, near-ties may make them differ."""
    parted = [key for key, figures in found.items() if figures.texts != found[key[0], "off"].texts]
    print("\nall arms gave the same tokens" if not parted else f"\ntokens differ from off: {parted}")
    return not parted


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a text")
    parser.add_argument("--requests", type=int, default=16, help="texts of every arm")
    parser.add_argument("--warm-up", type=int, default=2, help="texts before that are not counted")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
