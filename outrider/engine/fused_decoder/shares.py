"""How several processes may share a model's modules: along which side of a weight, and in what pieces.

    queries, keys, values, gate, up    what comes out: some heads, some columns of the MLP
    attention's output, down           what goes in: the parts that belong to those; the products are added
    embedding, output layer            some of the vocabulary
    everything else                    whole, such as the router of experts

Each process has some columns of all experts, not all columns of some: so all processes have equal work,
whatever experts tokens choose. (Shoeybi et al. 2019, "Megatron-LM".)

Shapes: C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.engine.fused_decoder.mixture import ForeignBlock, Mixture
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.recognise import EMBEDDING, HEAD, Modules, Parts
from outrider.engine.linears import linear_weight
from outrider.engine.loaded_model import Geometry
from outrider.engine.quantization.stacked import DOWN, GATE_UP, LAYERS

OUT, IN = 0, 1
"""Sides of a weight [out, in]."""


@dataclass(frozen=True, slots=True)
class Share:
    """How a module is shared: `runs` of numbers that follow each other along a side, each run shared by
    itself."""

    side: int
    runs: tuple[int, ...]
    piece: int
    """Numbers of a head, which stays whole; 0: a piece may have any size."""
    shape: tuple[int, ...]
    """(out, in) of the weight, (V, C) of an embedding, (out,) of a norm."""
    transposed: bool
    """True where the weight is stored as [in, out]."""
    words: bool = False
    """True where the run is the vocabulary."""
    stacked: bool = False
    """True where weights [E, out, in] and biases [E, out] are those of all experts."""
    together: int = 1
    """How many numbers that follow each other belong to one column of the MLP: 2 where gate and up
    alternate."""


def shares_of(network: PreTrainedModel) -> tuple[Geometry, dict[str, Share]]:
    """Return the heads of a model, which may be without weights, and the modules and weights that can be
    shared.

    Parts of a layer are keyed by the last two parts of their names, others by the last part.

    Raises:
        NotFused: the model is not of a known kind.
    """
    found = Modules(network)
    if any(parts.latent for parts in found.layers):
        raise NotFused("it has latent attention")
    geometry = _geometry(network, found.layers)
    named = chain(network.named_modules(), network.named_parameters())
    names = {id(part): name.split(".") for name, part in named}
    shares: dict[str, Share] = {}
    for module, known in ((found.embed, EMBEDDING), (found.head, HEAD)):  # checkpoints may use any of these
        shares |= dict.fromkeys(known, _share(module, OUT, (_shape(module)[0],), words=True))
    for parts in found.layers:
        if isinstance(parts.mlp, Mixture):
            shares |= _separate(parts.mlp)
        for part, share in _layer(parts, geometry):
            name = ".".join(names[id(part)][-2:])
            if shares.setdefault(name, share) != share:
                raise NotFused(f"its layers have a {name} of several shapes")
    return geometry, shares


def share_of(shares: Mapping[str, Share], name: str) -> Share | None:
    """Return the share of the module with this name, whatever comes before the layers' names."""
    parts = name.split(".")
    return shares.get(".".join(parts[-2:])) or shares.get(parts[-1])


def norms_together(shares: Mapping[str, Share]) -> bool:
    """True where queries and keys have norms over all heads, while each process has only some heads."""
    return any(name.endswith("_norm") for name in shares)


def _geometry(network: PreTrainedModel, layers: list[Parts]) -> Geometry:
    """Return the heads that the weights of the first layer show."""
    heads: int | None = getattr(network.config.get_text_config(), "num_attention_heads", None)
    if not heads:
        raise NotFused("its config.json has no num_attention_heads")
    wide, first = _shape(layers[0].output)[1], layers[0]
    width = wide // heads
    kv_heads, left = divmod(sum(_shape(module)[0] for module in first.qkv) - wide, 2 * width)
    if left or wide % heads or kv_heads < 1:
        raise NotFused("its queries, keys and values are not heads of one width")
    return Geometry(len(layers), heads, kv_heads, width, width)


def _layer(parts: Parts, geometry: Geometry) -> Iterator[tuple[nn.Module | nn.Parameter, Share]]:
    """The modules of a layer that can be shared, and weights that are in none."""
    yield from _attention(parts, geometry)
    match parts.mlp:
        case ForeignBlock():
            raise NotFused("its experts are not divided")
        case Mixture():
            yield from _experts(parts.mlp)
        case mlp:
            columns = _shape(mlp.down)[1]
            for module in mlp.up:  # gate and up may be one
                yield module, _share(module, OUT, (columns,) * (_shape(module)[0] // columns))
            yield mlp.down, _share(mlp.down, IN, (columns,))


def _attention(parts: Parts, geometry: Geometry) -> Iterator[tuple[nn.Module | nn.Parameter, Share]]:
    if len(parts.qkv) == 2:
        raise NotFused("its keys are values too")
    width = geometry.head_dim
    queries, keys = geometry.query_heads * width, geometry.kv_heads * width
    heads: list[tuple[int, ...]] = [(queries,), (keys,), (keys,)]
    norms = list(zip(parts.head_norms, heads, strict=False))
    # Over all heads. The only kv head has as many keys as a norm over each head, so queries tell.
    if all(_shape(module) == run for module, run in norms):
        for module, run in norms:
            yield module, _share(module, OUT, run, width)
    if parts.by_head:
        yield parts.qkv[0], _share(parts.qkv[0], OUT, (3 * queries,), 3 * width)
    else:
        runs = heads if len(parts.qkv) > 1 else [(queries, keys, keys)]
        for module, run in zip(parts.qkv, runs, strict=True):
            yield module, _share(module, OUT, run, width)
    yield parts.output, _share(parts.output, IN, (queries,), width)
    if parts.sinks is not None:
        sinks = geometry.query_heads
        yield parts.sinks, Share(OUT, (sinks,), piece=1, shape=(sinks,), transposed=False)


def _experts(mixture: Mixture) -> Iterator[tuple[nn.Parameter, Share]]:
    """The stacked weights and biases of all experts."""
    hidden, columns = mixture.widths
    runs, together = ((2 * columns,), 2) if mixture.alternating else ((columns, columns), 1)
    common: dict[str, Any] = {"transposed": mixture.experts.is_transposed, "stacked": True}
    up = Share(OUT, runs, 0, (2 * columns, hidden), together=together, **common)
    down = Share(IN, (columns,), 0, (hidden, columns), **common)
    for name, share in ((GATE_UP, up), (DOWN, down)):
        for weight in mixture.weights(name):
            yield weight, share


def _separate(mixture: Mixture) -> dict[str, Share]:
    """Return the shares of one expert's linear layers, which a checkpoint may hold separately."""
    hidden, columns = mixture.widths
    into = Share(OUT, (columns,), 0, (columns, hidden), transposed=False)
    out_of = Share(IN, (columns,), 0, (hidden, columns), transposed=False)
    shared = ((LAYERS[GATE_UP], into), (LAYERS[DOWN], out_of))
    return {name: share for ways, share in shared for layers in ways for name in layers}


def _share(
    module: nn.Module, side: int, runs: tuple[int, ...], piece: int = 0, *, words: bool = False
) -> Share:
    return Share(side, runs, piece, _shape(module), isinstance(module, Conv1D), words)


def _shape(module: Any) -> tuple[int, ...]:
    return tuple(linear_weight(module).shape)
