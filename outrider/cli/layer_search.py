"""`outrider layers`: which layers of a model a draft can do without.

The search is greedy: each round removes the layer whose loss leaves the acceptance highest, until the time
is over or one layer is left.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.cli import values
from outrider.cli.bench.prompts import read_prompts
from outrider.cli.model_flags import add_folder, add_machine_flags, add_number, add_traffic_flags
from outrider.cli.named_models import check_model
from outrider.cli.prompt_ids import check_prompts, token_ids_of
from outrider.cli.say import say
from outrider.layer_lists import spell_layers

if TYPE_CHECKING:
    from outrider.engine.loading.layer_agreement import LayerAgreement

LONGEST_DRAFT = 16
"""Longest chain of drafted tokens that an estimated speed-up may assume."""
HEADING = "layers  acceptance  cost  speed-up  skipped"


@dataclass(frozen=True, slots=True)
class Trial:
    """A model without some layers."""

    skipped: frozenset[int]
    acceptance: float
    """Probability that one of its tokens is accepted."""
    cost: float
    """Layers left, as a share of all."""

    @property
    def speed_up(self) -> float:
        """Expected tokens per time of a target step, at the best chain length, with draft and target taking
        turns on one processor.

        Source: Leviathan and others 2023, "Fast Inference from Transformers via Speculative Decoding".
        """
        lengths = range(1, LONGEST_DRAFT + 1)
        tokens = [sum(self.acceptance**place for place in range(length + 1)) for length in lengths]
        return max(count / (1 + length * self.cost) for count, length in zip(tokens, lengths, strict=True))


def search(
    layers: int, acceptance: Callable[[frozenset[int]], float], out_of_time: Callable[[], bool]
) -> Iterator[Trial]:
    """Yield the best trial of each size, from one layer skipped on; the last round may be cut short."""
    skipped: frozenset[int] = frozenset()
    while len(skipped) < layers - 1 and not out_of_time():
        tried = list[Trial]()
        for layer in range(layers):
            if layer not in skipped and not (tried and out_of_time()):
                without = skipped | {layer}
                tried.append(Trial(without, acceptance(without), (layers - len(without)) / layers))
        best = max(tried, key=lambda trial: trial.acceptance)
        yield best
        skipped = best.skipped


def run(arguments: argparse.Namespace) -> int:
    """Search, and print a line for every size; progress goes to standard error.

    Raises:
        OutriderError: the model cannot be loaded, or the prompts cannot be read.
    """
    agreement = _agreement(arguments)
    end = time.monotonic() + arguments.seconds
    count, trials = 0, list[Trial]()

    def acceptance(skipped: frozenset[int]) -> float:
        nonlocal count
        count += 1
        left = max(end - time.monotonic(), 0.0)
        say(f"trial {count}: {len(skipped)} of {agreement.layers} layers left out, {left:.0f} s left")
        return agreement.acceptance(skipped)

    print(HEADING)
    for trial in search(agreement.layers, acceptance, lambda: time.monotonic() >= end):
        trials.append(trial)
        layers = agreement.layers - len(trial.skipped)
        print(
            f"{layers:6}{trial.acceptance:12.3f}{trial.cost:6.2f}{trial.speed_up:10.2f}  "
            f"{spell_layers(trial.skipped)}",
            flush=True,
        )
    best = max(trials, key=lambda trial: trial.speed_up, default=None)
    if best is None or best.speed_up <= 1.0:
        say("no draft with fewer layers is expected to pay; take another draft")
        return 0
    model = ("--target", arguments.target, "--draft", arguments.target)
    print("\n" + shlex.join(["outrider", "up", *model, "--draft-skip-layers", spell_layers(best.skipped)]))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model, the prompts and the time limit."""
    add_folder(parser, "--target", "folder or hub id of the model")
    add_traffic_flags(parser, tokens=64)
    add_number(parser, "--seconds", values.seconds, 600.0, "longest search")
    add_machine_flags(parser)


def _agreement(arguments: argparse.Namespace) -> LayerAgreement:
    prompts = read_prompts(arguments.prompts)[: arguments.max_prompts]
    check_model("--target", arguments.target)
    from outrider.engine.loading.layer_agreement import LayerAgreement
    from outrider.engine.loading.loader import load_network
    from outrider.engine.loading.model_config import context_limit

    ids = token_ids_of(prompts, arguments.target)
    say(f"the target writes {arguments.tokens} tokens after each of {len(ids)} prompts")
    network = load_network(
        arguments.target, dtype=arguments.dtype, device=arguments.device, threads=arguments.threads
    )
    embeddings: Any = network.get_input_embeddings()
    limit = context_limit(network.config.get_text_config())
    check_prompts(ids, arguments.tokens, arguments.target, embeddings.weight.shape[0], limit)
    return LayerAgreement(network, ids, arguments.tokens, arguments.temperature)
