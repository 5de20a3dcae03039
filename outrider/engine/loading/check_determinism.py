"""The setting `deterministic`: for which models it is refused, and the check at load that it holds.

A token's bits do not depend on its batch where every product and the attention add up in one order. The
project's kernels do; libraries choose their order by the size of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn

from outrider.engine.cpu.layer import attends
from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.fused_decoder.activation import NAMES, has_kernel
from outrider.engine.fused_decoder.decoder import BoundedGate, Experts, ForeignMlp, Gate, PlainMlp
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.linears import HeadLinears
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.make_runner import make_runner
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError

LENGTH = 24
"""Tokens of the sequence that is computed in two ways; every model's context is at least this long."""
CONTEXT = 300
"""Tokens before that sequence on a GPU, where they fit: attention splits texts at 256 tokens."""
PIECE = 64
"""Tokens of a chunk when the context is read in chunks."""


def check_determinism(
    loaded: LoadedModel, prepare: Callable[[ModelRunner], None] = lambda runner: None
) -> None:
    """Refuse a model, packed already, whose results depend on the batch.

    `prepare` is called with the runner before this computes the sequences; on the CPU it has LENGTH pages of
    4 tokens.

    Raises:
        ModelError: a library computes part of the model, or a token has other bits in a tree than alone.
        TritonError: a kernel does not compile or does not fit the device.
    """
    refuse_library(loaded)
    generator = random.Random(0)
    context = min(CONTEXT, loaded.context_length - LENGTH) if loaded.kernels else 0
    tokens = [generator.randrange(loaded.vocabulary_size) for _ in range(context + LENGTH)]
    runner = make_runner(loaded, num_pages=LENGTH + context // 2, page_size=4)
    prepare(runner)
    if not torch.equal(_single(runner, tokens), _in_a_tree(runner, tokens, generator)):
        raise ModelError(
            f"deterministic: {loaded.kind} in {loaded.dtype_name} computes other bits for a token in a tree; "
            "set deterministic off"
        )


def refuse_library(loaded: LoadedModel) -> None:
    """Refuse a packed model of which a library computes some part.

    Raises:
        ModelError: a library does; the text names the part.
    """
    part = library_part(loaded)
    if part is not None:
        raise ModelError(
            f"deterministic: {part} is computed by the library's kernels here, "
            "whose sums depend on the batch; set deterministic off"
        )


def library_part(loaded: LoadedModel) -> str | None:
    """Return the part of a packed model that is not computed by kernels with one order of additions, or
    None."""
    network, geometry = loaded.model, loaded.geometry
    if (part := _without_kernels(loaded)) is not None:
        return part
    if not isinstance(network, FusedDecoder):
        return loaded.kind
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | CpuLinear | HeadLinears) and not getattr(module, "ordered", False):
            return f"{name} of {loaded.kind}"
        if isinstance(module, Gate | PlainMlp) and not _activates(module, loaded):
            return f"the activation of {loaded.kind}"
        if isinstance(module, Experts | ForeignMlp) and not _mixes(module, loaded):
            return f"the experts of {loaded.kind}"
    if not loaded.ordered and not attends(geometry.head_dim, loaded.dtype, loaded.device):
        return f"the attention of {loaded.kind}"
    return None


def _activates(module: Gate | PlainMlp, loaded: LoadedModel) -> bool:
    """True where the result of an MLP's activation for a number is the same in every batch."""
    if loaded.ordered:
        return module.activation in NAMES
    if isinstance(module, Gate) and module.opened:
        return True
    return has_kernel(module.activation, loaded.dtype, loaded.device)


def _mixes(module: Experts | ForeignMlp, loaded: LoadedModel) -> bool:
    """True where kernels compute everything after the router of experts."""
    if isinstance(module, ForeignMlp):
        return False
    if not loaded.ordered:
        return getattr(module.own, "ordered", False) is True
    return module.activation in NAMES or isinstance(module.gate, BoundedGate)


def _without_kernels(loaded: LoadedModel) -> str | None:
    """Return why a model on a GPU has no kernels with one order of additions, before its layers are
    examined."""
    if loaded.device.type == "cpu" or loaded.ordered:
        return None
    if loaded.ranks > 1:
        return f"a model in {loaded.ranks} ranks on {loaded.device}"
    if loaded.kernels:
        return f"{loaded.kind} on {loaded.device}"
    return f"a {loaded.dtype_name} model on {loaded.device}"


def _single(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Return the logits [LENGTH, V] of the last tokens, computed one by one; the context is read in
    chunks."""
    kv = SequenceKv.open(runner.pool, [])
    context = len(tokens) - LENGTH
    for start in range(0, context, PIECE):
        _read(runner, kv, tokens[start : min(start + PIECE, context)])
    rows = [_read(runner, kv, [token], [0]) for token in tokens[context:]]
    kv.release()
    return torch.cat(rows)


def _in_a_tree(runner: ModelRunner, tokens: list[int], generator: random.Random) -> torch.Tensor:
    """Return the same logits from a chunk, then from a tree with a decoy next to every token, in a batch
    after another sequence."""
    kv, other = (SequenceKv.open(runner.pool, []) for _ in range(2))
    half = LENGTH // 2
    first, branch = tokens[:-half], tokens[-half:]
    chunk = _read(runner, kv, first, range(len(first) - half, len(first)))
    nodes = [node for token in branch for node in (generator.randrange(LENGTH), token)]
    parents = [2 * (offset // 2) - 1 for offset in range(len(nodes))]
    tree = Segment(kv, nodes, parents, range(1, len(nodes), 2))
    rows = runner.forward([Segment(other, [1, 2, 3], None, []), tree])
    for sequence in (kv, other):
        sequence.release()
    return torch.cat([chunk, rows])


def _read(runner: ModelRunner, kv: SequenceKv, tokens: list[int], wanted: Sequence[int] = ()) -> torch.Tensor:
    """Compute the next tokens of a text and commit them; return logits [wanted, V]."""
    logits = runner.forward([Segment(kv, tokens, None, wanted)])
    runner.commit(kv, range(len(tokens)), tokens)
    return logits
