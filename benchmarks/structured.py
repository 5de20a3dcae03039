"""What a grammar costs and what it brings: acceptance length and tokens per second.

    python -m benchmarks.structured                      # the demo pair, one request at a time
    python -m benchmarks.structured --pair wide --temperature 1 --requests 32

    free                no constraint
    schema              the text is JSON under a schema with names that are known beforehand
    open                the text is some JSON object of four properties or more: little is known

Each alone (off), with a draft that knows the grammar, and with one that does not. The arms take turns,
request by request; seconds count from the first token to the last. Medians over the requests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from outrider.client import Client
from outrider.client.results import Generation
from scripts.child import Child
from scripts.local_services import DRAFT, TARGET, widened_target

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
TEXTS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "schema": {"json_schema": SCHEMA},
    "open": {"json_schema": {"type": "object", "minProperties": 4}},
}
ARMS = {
    "off": ("masked", "off"),
    "auto": ("masked", "auto"),
    "auto, draft without masks": ("unmasked", "auto"),
}
"""By name: which draft, and the mode."""


@dataclass(slots=True)
class Figures:
    """Of one arm and one kind of text."""

    lengths: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, found: Generation) -> None:
        """One text."""
        seconds = found.end.speculation["decode_micros"] * 1e-6
        self.tokens.append(found.token_ids)
        self.lengths.append(found.end.speculation["acceptance_length"])
        if seconds:
            self.rates.append((len(found.token_ids) - 1) / seconds)


def main() -> int:
    """Measure and print."""
    flags = _flags()
    target = widened_target() if flags.pair == "wide" else TARGET
    print(machine.lines(machine.describe()) + "\n")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = {
            name: stack.enter_context(Client(endpoint, timeout=600))
            for name, endpoint in _serve(stack, folder, target, flags.dtype).items()
        }
        found = _measure(clients, flags)
    _print(found)
    if flags.out:
        rows = [
            {
                "text": text,
                "arm": arm,
                "acceptance_length": figures.lengths,
                "tokens_per_second": figures.rates,
            }
            for (text, arm), figures in found.items()
        ]
        Path(flags.out).write_text(json.dumps({"machine": machine.describe(), "rows": rows}, default=str))
    return 0 if _equal(found) else 1


def _serve(stack: ExitStack, folder: Path, target: Path, dtype: str) -> dict[str, str]:
    """One target, a draft with masks and one without, and an orchestrator for each; their endpoints."""
    cores = machine.cores()
    own, others = (f"{cores[0]}", f"{cores[1]}") if len(cores) > 1 else ("", "")

    def start(module: str, service: str, name: str, cpus: str, *rest: str) -> Child:
        always = ["serve", service, "--name", name, "--port", "0", "--parent-pid", str(os.getpid())]
        pinned = ["--cpus", cpus] if cpus else []
        command = [sys.executable, "-m", module, *always, *pinned, *rest]
        return stack.enter_context(Child(command, folder / f"{name}.log"))

    model = ["--dtype", dtype, "--device", "cpu", "--model"]
    verify = start("outrider", "verify", "verify", own, *model, str(target))
    drafts = {
        "masked": start("outrider", "draft", "masked", others, *model, str(DRAFT)),
        "unmasked": start(
            "benchmarks.workers.unmasked_draft", "draft", "unmasked", others, *model, str(DRAFT)
        ),
    }
    found, behind = {}, ["--require-fit", "--verify", verify.receive()["endpoint"]]
    for name, draft in drafts.items():
        both = [*behind, "--draft", draft.receive()["endpoint"]]
        found[name] = str(
            start("outrider", "orchestrator", f"for-{name}", others, *both).receive()["endpoint"]
        )
    return found


def _measure(clients: dict[str, Client], flags: argparse.Namespace) -> dict[tuple[str, str], Figures]:
    found = {(text, arm): Figures() for text in TEXTS for arm in ARMS}
    for index in range(-flags.warm_up, flags.requests):
        for (text, arm), figures in found.items():
            draft, mode = ARMS[arm]
            options: Any = {"mode": mode, "max_tokens": flags.tokens, "task": f"{text} {arm}", **TEXTS[text]}
            options |= {"temperature": flags.temperature, "seed": index + 1000}
            answer = clients[draft].generate(PROMPT.format(index=index), **options).generations[0]
            if index >= 0:
                figures.add(answer)
    return found


def _print(found: dict[tuple[str, str], Figures]) -> None:
    print(f"{'text':8}{'arm':28}{'acceptance length':>18}{'tokens/s':>10}{'of off':>8}{'tokens':>8}")
    for (text, arm), figures in found.items():
        rate, alone = (_median(each.rates) for each in (figures, found[text, "off"]))
        length = _median(figures.lengths)
        tokens = statistics.mean(map(len, figures.tokens))
        print(f"{text:8}{arm:28}{length:18.2f}{rate:10.1f}{rate / alone:8.2f}{tokens:8.1f}")


def _median(values: list[float]) -> float:
    """Not a number where all texts came in one step."""
    return statistics.median(values) if values else math.nan


def _equal(found: dict[tuple[str, str], Figures]) -> bool:
    """Whether every arm said the same; in library kernels of bfloat16 near-ties may part."""
    parted = [key for key, figures in found.items() if figures.tokens != found[key[0], "off"].tokens]
    print("\nall arms gave the same tokens" if not parted else f"\ntokens differ from off: {parted}")
    return not parted


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pair", choices=("demo", "wide"), default="demo", help="wide: the 216 M target")
    parser.add_argument("--dtype", default="auto", help="arithmetic of the weights")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a text")
    parser.add_argument("--requests", type=int, default=16, help="texts of every arm")
    parser.add_argument("--warm-up", type=int, default=2, help="texts before that are not counted")
    parser.add_argument("--out", default="", metavar="FILE", help="write each request's figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
