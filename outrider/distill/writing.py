"""Has the target write after prompts, where nothing was collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outrider.collected import Collected
from outrider.distill.models import Pair
from outrider.distill.traffic import read_collected

AT_ONCE = 8
"""Prompts."""


def write(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float,
    path: Path,
    say: Callable[[int], None],
) -> list[Collected]:
    """The target's continuations of the prompts, which are in a file as well: what is there already is not
    written again. `say` is told how many there are."""
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        for first in range(done - done % AT_ONCE, len(prompts), AT_ONCE):
            lines = [
                one.line() for one in _continued(pair, prompts[first : first + AT_ONCE], tokens, temperature)
            ]
            file.writelines(lines[max(done - first, 0) :])
            file.flush()
            say(first + len(lines))
    return read_collected(str(path), pair.vocabulary).kept


@torch.inference_mode()
def _continued(
    pair: Pair, prompts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> list[Collected]:
    """Continuations up to an end of text; the same ones whenever they are asked for."""
    torch.manual_seed(sum(map(sum, prompts)))
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
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
        Collected(pair.vocabulary, "", len(prompt), (*prompt, *_up_to_end(row[longest:].tolist(), pair)))
        for prompt, row in zip(prompts, whole, strict=True)
    ]


def _up_to_end(tokens: list[int], pair: Pair) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in pair.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens
