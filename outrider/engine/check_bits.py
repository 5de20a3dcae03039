"""The self check of deterministic arithmetic: are a token's bits the same however it is computed?

One sequence is computed token by token; then again in other chunks, then from reused pages in trees with
other branches and among other sequences. Logits, keys and values must be equal in every bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from outrider.engine.arithmetic import KEYS_PER_BLOCK
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.errors import ModelError

STEPS = 12
"""Tokens that are computed one at a time; half of them are behind the end of a block of keys."""
PAGE_SIZE = 8


def check_bits(loaded: LoadedModel) -> None:
    """Compute one sequence in several ways and compare bit for bit.

    Raises:
        ModelError: something differs.
    """
    prefix = min(KEYS_PER_BLOCK - STEPS // 2, loaded.context_length - STEPS)
    generator = random.Random(0)
    tokens = [generator.randrange(loaded.vocabulary_size) for _ in range(prefix + STEPS)]
    runner = ModelRunner(loaded, num_pages=4 * -(-len(tokens) // PAGE_SIZE), page_size=PAGE_SIZE)
    alone = _Run(runner, tokens, [prefix, *[1] * STEPS])
    chunked = _Run(runner, tokens, [prefix // 3, prefix - prefix // 3, 5, STEPS - 5])
    same = torch.equal(alone.logits[-STEPS:], chunked.logits[-STEPS:])
    if not same or not torch.equal(alone.entries, chunked.entries):
        raise _differs(loaded, "in another chunk of its prompt")
    tree = _tree_logits(runner, tokens, generator)
    if not torch.equal(alone.logits[-len(tree) :], tree):
        raise _differs(loaded, "in a tree or batch")


class _Run:
    """`tokens` computed in chunks of these sizes.

    `logits` [T, V] of every token, `entries` [layers, T, ...] their keys and values.
    """

    def __init__(self, runner: ModelRunner, tokens: list[int], sizes: Sequence[int]) -> None:
        kv = SequenceKv.open(runner.pool, tokens, reuse=False)
        parts: list[torch.Tensor] = []
        for size in sizes:
            chunk = tokens[kv.length : kv.length + size]
            parts.append(runner.forward([Segment(kv, chunk, None, range(size))]))
            runner.commit(kv, range(size), chunk)
        self.logits = torch.cat(parts)
        slots = torch.from_numpy(kv.slots[: kv.length].copy()).to(runner.loaded.device)
        self.entries = runner.attention.stored(slots)
        kv.release()


def _tree_logits(runner: ModelRunner, tokens: list[int], generator: random.Random) -> torch.Tensor:
    """Logits of the last tokens, in a tree with a decoy behind every node, between two other sequences."""
    kv = SequenceKv.open(runner.pool, tokens)
    others = [SequenceKv.open(runner.pool, [], reuse=False) for _ in range(2)]
    rest = tokens[kv.length :]
    nodes, parents, wanted = [], [], []
    above = -1
    for token in rest:
        nodes += [generator.randrange(runner.loaded.vocabulary_size), token]
        parents += [above, above]
        above = len(nodes) - 1
        wanted.append(above)
    segments = [
        Segment(others[0], [1], None, []),
        Segment(kv, nodes, parents, wanted),
        Segment(others[1], [2, 3, 4], None, []),
    ]
    logits = runner.forward(segments)
    for sequence in (kv, *others):
        sequence.release()
    return logits


def _differs(loaded: LoadedModel, where: str) -> ModelError:
    return ModelError(
        f"deterministic: {loaded.kind} in {loaded.dtype_name} computes other bits for a token {where}; "
        "set deterministic off"
    )
