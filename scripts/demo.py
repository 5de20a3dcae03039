"""The demo: starts three services, streams a completion, compares modes, and proves that tokens are equal.

    make demo
    make demo ARGS=--stay    # keeps serving afterwards, for clients of gRPC and of the OpenAI API

The demo pair runs in float32, where rounding can hardly change a token. The trained target is so small that
its step is mostly overhead, so its MLP is first widened to 216 M parameters. This changes no output, but each
step has to read the weights of a larger model, for which speculation is meant.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from outrider.client import Chunk, Client, Options
from outrider.client.request import Mode
from scripts.child import ROOT
from scripts.console import run
from scripts.local_services import services, widened_target

TIMELINE = ROOT / "out/timeline.html"
MODES: dict[str, Mode] = {"no speculation": "off", "sequential": "sequential", "pipelined": "auto"}
TOKENS = 48
ROUNDS = 2
STORY = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n'
PROMPTS = (
    STORY,
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "def test_read_empty_file(self):\n    with open(path, 'rb') as f:\n",
)
SAMPLED: Options = {"temperature": 0.7, "seed": 7}
SETTINGS: dict[str, Options] = {"greedy": {}, "sampled": SAMPLED}


@dataclass
class ModeTally:
    """Sums over all requests of one mode."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    hits: int = 0
    outputs: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Token ids by setting and prompt."""

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


def measure(client: Client, tally: ModeTally, prompt: str, mode: Mode, setting: str) -> None:
    """Run one request and add it to the tally of its mode."""
    started = time.monotonic()
    options = SETTINGS[setting] | Options(mode=mode, max_tokens=TOKENS, ignore_eos=True)
    result = client.generate(prompt, **options)
    counts = result.generations[0].end.speculation
    tally.seconds += time.monotonic() - started
    tally.steps += int(counts["steps"])
    tally.hits += int(counts["hits"])
    tally.tokens += len(result.token_ids)
    tally.outputs[setting, prompt] = list(result.token_ids)


def compare(client: Client) -> dict[str, ModeTally]:
    """Run all modes on the same prompts, in turn, so that noise of the machine affects all of them.

    Each time another mode begins: the first one reads the prompt, the others find it cached.
    """
    tallies = {name: ModeTally() for name in MODES}
    order = deque(MODES.items())
    for _, setting, prompt in product(range(ROUNDS), SETTINGS, PROMPTS):
        for name, mode in order:
            measure(client, tallies[name], prompt, mode, setting)
        order.rotate(1)
    return tallies


def print_story(client: Client) -> None:
    """Print a completion while it is generated."""
    print(f"\n\033[2m{STORY}\033[0m", end="")
    for event in client.stream(STORY, max_tokens=TOKENS, ignore_eos=True, **SAMPLED):
        if isinstance(event, Chunk):
            print(event.text, end="", flush=True)
    print("\n")


def print_table(tallies: dict[str, ModeTally]) -> None:
    """Print the speed and acceptance of every mode."""
    base = tallies["no speculation"].rate
    print(f"{'':16}{'tokens/s':>10}{'ratio':>8}{'acceptance length':>20}{'hit rate':>10}")
    for name, tally in tallies.items():
        length, hits = tally.tokens / tally.steps, tally.hits / tally.steps
        print(f"{name:16}{tally.rate:10.1f}{tally.rate / base:8.2f}{length:20.2f}{hits:10.0%}")


def transformers_greedy(target: Path, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens that plain `transformers` generates."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
        )
        found.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return found


def equal(tallies: dict[str, ModeTally], target: Path) -> bool:
    """Print and return whether all modes generated the same tokens as each other and as `transformers`."""
    alone = tallies["no speculation"].outputs
    modes_agree = all(tally.outputs == alone for tally in tallies.values())
    greedy = transformers_greedy(target, PROMPTS)
    reference_agrees = greedy == [alone["greedy", prompt] for prompt in PROMPTS]
    count = sum(map(len, alone.values()))
    print(f"\n{count} tokens, greedy and at T = 0.7: all modes {'EQUAL' if modes_agree else 'DIFFER'}")
    print(f"greedy against transformers' generate(): {'EQUAL' if reference_agrees else 'DIFFER'}")
    return modes_agree and reference_agrees


def draw_timeline(endpoint: str) -> None:
    """Write the picture of one request's steps."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "timeline",
        "--endpoint",
        endpoint,
        "--max-tokens",
        str(TOKENS),
    ]
    subprocess.run([*command, "--output", str(TIMELINE), STORY], check=True, stderr=subprocess.DEVNULL)


def curl(url: str) -> str:
    """A `curl` command for the OpenAI API, to paste into a shell."""
    body = {"prompt": "def fibonacci(n):\n", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    header = "content-type: application/json"
    return shlex.join(["curl", "-N", f"{url}/v1/completions", "-H", header, "-d", json.dumps(body)])


def stay(ready: dict[str, str]) -> None:
    """Print the addresses of the services, and wait for Ctrl-C or SIGTERM."""
    print(f"\nServing on: gRPC at {ready['endpoint']}, the OpenAI API at {ready['http']}/v1; Ctrl-C stops.")
    print(f"\n{curl(ready['http'])}\n", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 if all tokens are equal."""
    parser = argparse.ArgumentParser(prog="make demo", description="Run the demo.")
    parser.add_argument("--stay", action="store_true", help="keep serving afterwards, until Ctrl-C")
    staying = parser.parse_args(arguments).stay
    TIMELINE.parent.mkdir(exist_ok=True)
    target = widened_target()
    print("Starting orchestrator, draft and verify service ...", flush=True)
    with (
        services(target, "float32", TIMELINE.with_name("services.log")) as ready,
        Client(ready["endpoint"]) as client,
    ):
        print_story(client)
        print(
            f"Comparing: {len(PROMPTS)} prompts, greedy and sampled, {ROUNDS} rounds in turn ...\n",
            flush=True,
        )
        tallies = compare(client)
        draw_timeline(ready["endpoint"])
        print_table(tallies)
        same = equal(tallies, target)
        print(f"timeline: {TIMELINE.relative_to(ROOT)}")
        print(f"OpenAI API: {ready['http']}/v1")
        if staying:
            stay(ready)
    if not staying:
        print("It has ended with the demo; `make demo ARGS=--stay` serves on.")
    return 0 if same else 1


if __name__ == "__main__":
    run(main)
