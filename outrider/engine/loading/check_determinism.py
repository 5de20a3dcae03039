"""`deterministic`: what it is refused for, and the check at load that it holds.

A token's bits do not depend on its batch where every product and the attention add up in one order. Kernels
of our own do, on the CPU; libraries choose their order by the size of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from outrider.engine.cpu.layer import attends
from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.fused_decoder.activation import has_kernel
from outrider.engine.fused_decoder.decoder import Experts, Gate, PlainMlp
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError

LENGTH = 24
"""Tokens of the sequence that is computed in two ways; at least this many fit every model."""


def check_determinism(
    loaded: LoadedModel, prepare: Callable[[ModelRunner], None] = lambda runner: None
) -> None:
    """Refuse a model, packed already, whose results depend on the batch.

    `prepare` gets the runner that computes the sequences, of LENGTH pages of 4 tokens, before it does.

    Raises:
        ModelError: a library computes some of it, or a token got other bits in a tree than by itself.
    """
    refuse_library(loaded)
    generator = random.Random(0)
    tokens = [generator.randrange(loaded.vocabulary_size) for _ in range(LENGTH)]
    runner = ModelRunner(loaded, num_pages=LENGTH, page_size=4)
    prepare(runner)
    if not torch.equal(_single(runner, tokens), _in_a_tree(runner, tokens, generator)):
        raise ModelError(
            f"deterministic: {loaded.kind} in {loaded.dtype_name} computes other bits for a token in a tree; "
            "set deterministic off"
        )


def refuse_library(loaded: LoadedModel) -> None:
    """Refuse a packed model some of which a library computes.

    Raises:
        ModelError: it does; names the part.
    """
    part = library_part(loaded)
    if part is not None:
        raise ModelError(
            f"deterministic: {part} is computed by the library's kernels here, "
            "whose sums depend on the batch; set deterministic off"
        )


def library_part(loaded: LoadedModel) -> str | None:
    """What of a packed model is not left to kernels that add up in one order; None where all of it is."""
    network, geometry = loaded.model, loaded.geometry
    if loaded.device.type != "cpu":
        return f"a model on {loaded.device}"
    if not isinstance(network, FusedDecoder):
        return loaded.kind
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | CpuLinear) and not getattr(module, "ordered", False):
            return f"{name} of {loaded.kind}"
        if isinstance(module, Gate) and not module.opened:
            return f"the activation of {loaded.kind}"
        if isinstance(module, PlainMlp) and not has_kernel(module.activation, loaded.dtype, loaded.device):
            return f"the activation of {loaded.kind}"
        if isinstance(module, Experts):
            return f"the experts of {loaded.kind}"
    simple = all(layer.settings.scores.simple for layer in network.stack)
    if not simple or not attends(geometry.head_dim, loaded.dtype, loaded.device):
        return f"the attention of {loaded.kind}"
    return None


def _single(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """[LENGTH, V] logits, token by token."""
    kv = SequenceKv.open(runner.pool, [], reuse=False)
    rows = []
    for token in tokens:
        rows.append(runner.forward([Segment(kv, [token], None, [0])]))
        runner.commit(kv, [0], [token])
    kv.release()
    return torch.cat(rows)


def _in_a_tree(runner: ModelRunner, tokens: list[int], generator: random.Random) -> torch.Tensor:
    """The same from a chunk, then a tree with a decoy beside every token, behind another sequence."""
    kv, other = (SequenceKv.open(runner.pool, [], reuse=False) for _ in range(2))
    half = LENGTH // 2
    chunk = runner.forward([Segment(kv, tokens[:half], None, range(half))])
    runner.commit(kv, range(half), tokens[:half])
    nodes = [node for token in tokens[half:] for node in (generator.randrange(len(tokens)), token)]
    parents = [2 * (offset // 2) - 1 for offset in range(len(nodes))]
    tree = Segment(kv, nodes, parents, range(1, len(nodes), 2))
    rows = runner.forward([Segment(other, [1, 2, 3], None, []), tree])
    for sequence in (kv, other):
        sequence.release()
    return torch.cat([chunk, rows])
