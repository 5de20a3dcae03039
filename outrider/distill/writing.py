"""Lets the target continue prompts, when nothing or too little was collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.collected import Collected
from outrider.distill.models import Pair
from outrider.distill.traffic import read_collected

AT_ONCE = 64
"""Number of prompts that are continued at once."""


class Prompt(NamedTuple):
    """A text that the target continues."""

    tokens: tuple[int, ...]
    task: str = ""


def prompts_of(found: Sequence[Collected]) -> list[Prompt]:
    """The prompts of continuations, each once, in order."""
    return list(dict.fromkeys(Prompt(one.tokens[: one.prompt], one.task) for one in found))


def write(
    pair: Pair,
    prompts: Sequence[Prompt],
    tokens: int,
    temperature: float,
    path: Path,
    say: Callable[[int], None],
) -> list[Collected]:
    """The target's continuations of the prompts. They are also kept in the file `path`, and those that it
    already has are not made again. `say` is called with their number so far. A prompt that occurs several
    times is continued in different ways, unless the temperature is 0."""
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        for first in range(done - done % AT_ONCE, len(prompts), AT_ONCE):
            torch.manual_seed(first)  # so that every run makes the same texts
            portion = prompts[first : first + AT_ONCE]
            lines = [one.line() for one in _continued(pair, portion, tokens, temperature)]
            file.writelines(lines[max(done - first, 0) :])
            file.flush()
            say(first + len(lines))
    return read_collected(str(path), pair.vocabulary, pair.size).kept


@torch.inference_mode()
def _continued(pair: Pair, prompts: Sequence[Prompt], tokens: int, temperature: float) -> list[Collected]:
    """Continuations up to an end token."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    padded = [[0] * (longest - len(ids)) + list(ids) for ids, _ in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in prompts]
    place = pair.target.device
    chosen = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    whole = pair.target.generate(
        torch.tensor(padded, device=place),
        attention_mask=torch.tensor(mask, device=place),
        pad_token_id=0,
        max_new_tokens=tokens,
        **(chosen if temperature else {"do_sample": False}),
    )
    return [
        Collected(pair.vocabulary, task, len(ids), (*ids, *_up_to_end(row[longest:].tolist(), pair)))
        for (ids, task), row in zip(prompts, whole, strict=True)
    ]


def _up_to_end(tokens: list[int], pair: Pair) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in pair.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens
