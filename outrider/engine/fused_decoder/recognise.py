"""Makes a fused decoder from a transformers model whose layers are of a known kind.

A model is recognised by the names of its modules, and by what is left over: every weight must have found its
place. What modules do not show is found out by running them (`known_norms`, `turning`). What this cannot
find, such as other factors in the code, is left to the self check.

The fused weights take the place of the modules' own, which become views of them: nothing is held twice. Only
queries, keys and values whose rows are reordered are held twice, until the model is released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.decoder import (
    FusedDecoder,
    FusedLayer,
    Gate,
    GatedMlp,
    Growth,
    LayerSettings,
    Norm,
    PlainMlp,
    Rope,
    Scores,
)
from outrider.engine.fused_decoder.joining import joined, side_by_side, with_rows
from outrider.engine.fused_decoder.known_norms import described
from outrider.engine.fused_decoder.latent import latent_parts
from outrider.engine.fused_decoder.mixture import ForeignBlock, Mixture, is_mixture
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.own_inputs import input_parts, taking_parts
from outrider.engine.fused_decoder.turning import Observed, Turn, still, turns_of
from outrider.engine.loaded_model import Geometry

_BODY = ("model", "gpt_neox", "transformer")
_TEXT = ("language_model", "text_model", "decoder")
_LAYERS = ("layers", "h")
EMBEDDING = ("embed_tokens", "embed_in", "wte")
_POSITIONS = ("wpe", "embed_positions")
_LAST_NORM = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
HEAD = ("lm_head", "embed_out")
_ATTENTION = ("self_attn", "attention", "attn")
_BY_HEAD = "query_key_value"
_QKV = (
    *(("qkv_proj",), (_BY_HEAD,), ("c_attn",), ("q_proj", "k_proj", "v_proj")),
    *(("q_proj", "k_proj"), ("q_proj",)),
)
"""Names of the linear layers for queries, keys and values. In the last list but one the keys are also the
values; with the last, they come from an earlier layer (Gemma 4)."""
_OUTPUT = ("o_proj", "dense", "c_proj", "out_proj")
_GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"))
_UP = ("dense_h_to_4h", "c_fc", "fc1", "up_proj")
_MLP = ("mlp", "block_sparse_moe")
_UP_IN_LAYER = "fc1"
"""OPT's layers have no module for the MLP."""
_DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2")
_ACTIVATION = ("act_fn", "activation_fn", "act")
"""The names of each part: one module, or several that are fused to one."""
_NORMS: tuple[dict[str, modules.Names], ...] = (
    {
        "input_norm": ("input_layernorm",),
        "output_norm": ("post_self_attn_layernorm",),
        "mlp_norm": ("post_attention_layernorm",),
        "down_norm": ("post_mlp_layernorm",),
    },
    {
        "input_norm": ("input_layernorm",),
        "output_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "down_norm": ("post_feedforward_layernorm",),
    },
    {"output_norm": ("post_attention_layernorm",), "down_norm": ("post_feedforward_layernorm",)},
    {
        "input_norm": ("input_layernorm", "ln_1", "attention_layernorm", "self_attn_layer_norm"),
        "mlp_norm": ("post_attention_layernorm", "ln_2", "feedforward_layernorm", "final_layer_norm"),
    },
    {"input_norm": ("input_layernorm",)},
)
"""The names of a layer's norms by their place, as in GLM 4, Gemma, OLMo 2, most models, and Phi. A layer's
norms are the first set that it has completely."""


def fused_decoder(
    network: PreTrainedModel,
    geometry: Geometry,
    windows: Mapping[int, int | None],
    observed: Sequence[Observed] = (),
    instead: Mapping[int, int] | None = None,
) -> FusedDecoder:
    """Return the fused decoder of a model. `windows` are the sliding windows of its layers; `instead` says
    which tokens are embedded in place of others.

    Layers that were not `observed` are assumed to rotate like those of most models, and to bound scores as
    their modules say. The model keeps computing the same, with the same weights.

    Raises:
        NotFused: the model is not of a known kind.
    """
    found, text = Modules(network), network.config.get_text_config()
    like = found.embed.weight
    geometry = _kept(found, geometry)
    shapes = _shapes(geometry)
    if getattr(text, "clip_qkv", None) is not None:  # the self check may not reach the bound
        raise NotFused("its queries, keys and values are bounded")
    _refuse_leftovers(network, found.all())
    seen: Sequence[Observed | None] = observed or [None] * len(shapes)
    turns, ropes = _turns(found, text, seen, shapes)
    return FusedDecoder(
        type(network).__name__,
        geometry,
        embed=found.embed,
        layers=[
            _layer(i, parts, shapes[i], _scores(parts, shapes[i], windows[i], seen[i]), turns[i], ropes, like)
            for i, parts in enumerate(found.layers)
        ],
        norm=described(found.norm, like),
        head=found.head,
        ropes=ropes,
        softcap=getattr(text, "final_logit_softcapping", None),
        positions=None if found.places is None else modules.from_position_0(found.places),
        embedding_factor=float(getattr(found.body, "embedding_multiplier", 1.0)),
        logit_factor=_logit_factor(network),
        embedded=_embedded(instead, text.vocab_size, like.device) if instead else None,
        inputs=None if found.inputs is None else found.inputs.fused(like),
    )


def _embedded(instead: Mapping[int, int], vocabulary: int, device: torch.device) -> Tensor:
    """Return [V]: the token that is embedded in place of each."""
    table = torch.arange(vocabulary, device=device)
    for token, other in instead.items():
        table[token] = other
    return table


class Modules:
    """The modules of a model by their place in a fused decoder.

    Raises:
        NotFused: one is missing.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self.body, self._unused = _text_body(modules.child(network, *_BODY))
        self.head, self.embed = modules.linear(network, *HEAD), modules.embedding(self.body, *EMBEDDING)
        embedded = any(hasattr(self.body, name) for name in _POSITIONS)
        self.places = modules.embedding(self.body, *_POSITIONS) if embedded else None
        self.inputs = input_parts(self.body)
        self.norm = modules.norm(self.body, *_LAST_NORM)
        self.layers = [Parts(layer) for layer in modules.child(self.body, *_LAYERS).children()]

    def all(self) -> list[nn.Module | nn.Parameter]:
        """Every module with weights, and weights that are in none of them."""
        outside = [self.head, self.embed, self.norm, *([self.places] if self.places else ()), *self._unused]
        if self.inputs is not None:
            outside += self.inputs.all()
        return [*outside, *chain(*(parts.all() for parts in self.layers))]


class Parts:
    """The modules of one decoder layer by their place in a fused one."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention = modules.child(layer, *_ATTENTION)
        self.latent = latent_parts(self.attention)
        self.qkv = [] if self.latent else modules.linears(self.attention, _QKV)
        self.by_head = hasattr(self.attention, _BY_HEAD)
        heads = [name for name in ("q_norm", "k_norm") if hasattr(self.attention, name)]
        self.head_norms = [modules.norm(self.attention, name) for name in heads]
        self.value_norm: nn.Module | None = getattr(self.attention, "v_norm", None)
        self.output = modules.linear(self.attention, *_OUTPUT)
        self.mlp = _mlp(layer if hasattr(layer, _UP_IN_LAYER) else modules.child(layer, *_MLP))
        self.norms = _norms(layer)
        # Without a norm of its own an MLP reads what attention reads.
        shared = [*self.norms] == ["input_norm"]
        self.parallel = bool(getattr(layer, "use_parallel_residual", shared))
        self.mlp_norm = "input_norm" if shared else "mlp_norm"
        self.added_factor = float(getattr(layer, "residual_multiplier", 1.0))
        self.sinks: Any = getattr(self.attention, "sinks", None)
        self.inputs = taking_parts(layer)
        self.factor: Any = getattr(layer, "layer_scalar", 1.0)

    def all(self) -> Iterator[nn.Module | nn.Parameter]:
        """Every module with weights, and weights that are in none of them."""
        yield from (*self.qkv, *self.head_norms, self.output, *self.mlp.all(), *self.norms.values())
        yield from (part for part in (self.sinks, self.value_norm) if part is not None)
        others = [part for part in (self.inputs, self.latent) if part is not None]
        yield from chain(*(part.all() for part in others))

    def fused_attention(
        self, geometry: Geometry, order: Tensor | None, like: Tensor
    ) -> tuple[nn.Module, nn.Module]:
        """The products before and after attention; see `fused_qkv`."""
        if self.latent is not None:
            return self.latent.fused(self.output, geometry.query_heads, order, like)
        return self.fused_qkv(geometry, order), self.output

    def fused_qkv(self, geometry: Geometry, order: Tensor | None) -> nn.Module:
        """One product for queries, keys and values; columns [D] of queries and keys are in this order."""
        parts = self.qkv
        if len(parts) == 2:
            parts = [*parts, parts[1]]
        fused = side_by_side(parts[0], geometry.query_heads) if self.by_head else joined(parts)
        if order is None:
            return fused
        rotated = geometry.query_heads + geometry.kv_heads
        rows = torch.arange((rotated + geometry.kv_heads) * geometry.head_dim).view(-1, geometry.head_dim)
        return with_rows(fused, torch.cat([rows[:rotated, order], rows[rotated:]]).flatten())


def _norms(layer: nn.Module) -> dict[str, nn.Module]:
    """A layer's norms by their place."""

    def there(names: modules.Names) -> bool:
        return any(getattr(layer, name, None) is not None for name in names)

    found = next((one for one in _NORMS if all(map(there, one.values()))), _NORMS[-1])
    return {place: modules.norm(layer, *names) for place, names in found.items()}


class _GatedMlp:
    """The modules of an MLP with a gate."""

    def __init__(self, mlp: nn.Module) -> None:
        self.up, self.down = modules.linears(mlp, _GATE_UP), modules.linear(mlp, *_DOWN)
        self.activation = modules.activation(mlp, *_ACTIVATION)

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [*self.up, self.down]

    def fused(self) -> GatedMlp:
        """Return the fused MLP, with one product for gate and up."""
        return GatedMlp(Gate(joined(self.up), self.activation), self.down)


class _PlainMlp:
    """The modules of an MLP without a gate."""

    def __init__(self, mlp: nn.Module) -> None:
        self.up, self.down = [modules.linear(mlp, *_UP)], modules.linear(mlp, *_DOWN)
        self.activation = modules.activation(mlp, *_ACTIVATION)

    def all(self) -> list[nn.Module]:
        """See `_GatedMlp.all`; some activations have weights."""
        own = [self.activation] if isinstance(self.activation, nn.Module) else []
        return [*self.up, self.down, *own]

    def fused(self) -> PlainMlp:
        """Return the fused MLP, made of the same modules."""
        return PlainMlp(self.up[0], self.activation, self.down)


def _mlp(mlp: nn.Module) -> _GatedMlp | _PlainMlp | Mixture | ForeignBlock:
    if hasattr(mlp, "experts"):
        return Mixture(mlp) if is_mixture(mlp) else ForeignBlock(mlp)
    gated = any(hasattr(mlp, names[0]) for names in _GATE_UP)
    return _GatedMlp(mlp) if gated else _PlainMlp(mlp)


def _turns(
    found: Modules, text: Any, observed: Sequence[Observed | None], shapes: Sequence[Geometry]
) -> tuple[list[Turn], list[Rope]]:
    """Return how each layer rotates, and the ropes that some layer uses."""
    if found.places is not None:
        turns = [Turn(still(found.embed.weight.device), None)] * len(observed)
    else:
        whole = any(parts.head_norms for parts in found.layers)  # kernels norm only the rotated columns
        widths = [shape.head_dim - shape.value_dim * shape.latent for shape in shapes]
        turns = turns_of(observed, _ropes(found.body, text), widths, whole=whole)
    return turns, list(dict.fromkeys(turn.rope for turn in turns))


def _ropes(body: nn.Module, text: Any) -> list[Rope]:
    """The ropes of a model: one for all layers, or for each type of layer."""
    rotary: Any = modules.child(body, "rotary_emb")
    growth = _growth(getattr(text, "rope_parameters", None) or {})
    ropes = [
        Rope(frequencies, float(getattr(rotary, name.replace("inv_freq", "attention_scaling"), 1.0)), growth)
        for name, frequencies in rotary.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    if not ropes:
        raise NotFused("its rotary embedding has no frequencies of a known name")
    return ropes


def _growth(settings: Mapping[str, Any]) -> Growth | None:
    rate, period = settings.get("llama_4_scaling_beta"), settings.get("original_max_position_embeddings")
    return Growth(rate, period) if rate and period else None


def _logit_factor(network: PreTrainedModel) -> float:
    """Return the factor of logits: Cohere's are multiplied, Granite's divided."""
    divisor = getattr(network.config.get_text_config(), "logits_scaling", 1.0)
    return float(getattr(network, "logit_scale", 1.0)) / float(divisor)


def _kept(found: Modules, geometry: Geometry) -> Geometry:
    """The shape of what is kept: of latents, where layers make keys and values of these."""
    kinds = {parts.latent.kept(geometry) if parts.latent else geometry for parts in found.layers}
    kept = kinds.pop()
    if kinds or (kept.latent and geometry.parts):
        raise NotFused("only some of its layers have latent attention, or its layers differ in it")
    return kept


def _shapes(geometry: Geometry) -> list[Geometry]:
    """Return each layer's own heads; no kv heads where it sees keys and values of an earlier layer."""
    if not geometry.latent and any(one.value_dim != one.head_dim for one in geometry.parts or (geometry,)):
        raise NotFused("its values are not as wide as its keys")
    shapes, places = [], geometry.places or [(0, layer) for layer in range(geometry.num_layers)]
    for layer, place in enumerate(places):
        if place is None:
            raise NotFused(f"layer {layer} has no attention")
        shape = (geometry.parts or (geometry,))[place[0]]
        shapes.append(replace(shape, kv_heads=0) if place in places[:layer] else shape)
    return shapes


def _layer(
    index: int,
    parts: Parts,
    geometry: Geometry,
    scores: Scores,
    turn: Turn,
    ropes: Sequence[Rope],
    like: Tensor,
) -> FusedLayer:
    norms = {place: described(norm, like) for place, norm in parts.norms.items()}
    of_heads = (described(norm, like) for norm in parts.head_norms)
    head_norm, whole_norms = _query_norms(
        [_in_order(norm, geometry.head_dim, turn.order) for norm in of_heads], geometry
    )
    inputs, inputs_norm = (None, None) if parts.inputs is None else parts.inputs.fused(like)
    settings = LayerSettings(
        input_norm=norms.get("input_norm"),
        mlp_norm=norms.get(parts.mlp_norm),
        output_norm=norms.get("output_norm"),
        down_norm=norms.get("down_norm"),
        head_norm=head_norm,
        whole_norms=whole_norms,
        value_norm=_value_norm(parts, geometry, like),
        whole_means=None,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        rope=ropes.index(turn.rope),
        scores=scores,
        parallel=parts.parallel,
        added_factor=parts.added_factor,
        inputs_norm=inputs_norm,
        factor=float(parts.factor),
        latent=geometry.latent,
    )
    qkv, output = parts.fused_attention(geometry, turn.order, like)
    return FusedLayer(index, settings, qkv=qkv, output=output, mlp=parts.mlp.fused(), inputs=inputs)


def _value_norm(parts: Parts, geometry: Geometry, like: Tensor) -> Norm | None:
    if parts.value_norm is None:
        return None
    norm = described(parts.value_norm, like, geometry.head_dim)
    if len(norm.weight) != geometry.head_dim:
        raise NotFused("its norm of values is not over a head")
    return norm


def _scores(parts: Parts, geometry: Geometry, window: int | None, seen: Observed | None) -> Scores:
    """How a layer scores its keys. The bound that Gemma 3's modules have is not used."""
    attention = parts.attention
    named = getattr(attention, "attn_logit_softcapping", None)
    return Scores(
        scaling=float(getattr(attention, "scaling", geometry.head_dim**-0.5)),
        window=window,
        softcap=named if seen is None else seen.softcap,
        sinks=None if parts.sinks is None else parts.sinks.detach(),
    )


def _text_body(body: nn.Module) -> tuple[nn.Module, list[nn.Module | nn.Parameter]]:
    """Return the module that computes texts, and what it leaves unused: models that take images have parts
    for them."""
    parts = dict(body.named_children())
    text = next((parts.pop(name) for name in _TEXT if name in parts), None)
    if text is None:
        return body, []
    return text, [*parts.values(), *body.parameters(recurse=False)]


def _refuse_leftovers(network: nn.Module, known: Sequence[nn.Module | nn.Parameter]) -> None:
    found: set[int] = set()
    for one in known:
        found.update(map(id, one.parameters() if isinstance(one, nn.Module) else [one]))
    for name, weight in network.named_parameters():
        if id(weight) not in found:
            raise NotFused(f"{name} has no place in the fused decoder")


def _query_norms(found: Sequence[Norm], geometry: Geometry) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    """Return the norms of queries and keys: one norm with weights for each head, or one each over all
    heads."""
    if not found:
        return None, None
    heads, width = (geometry.query_heads, geometry.kv_heads)[: len(found)], geometry.head_dim
    widths = [len(norm.weight) for norm in found]
    if widths == [width] * len(found) and not any(norm.centred for norm in found):
        rows = [norm.weight.expand(count, -1) for norm, count in zip(found, heads, strict=True)]
        return Norm(torch.cat(rows), found[0].eps), None
    if len(found) == 2 and widths == [count * width for count in heads]:
        return None, (found[0], found[1])
    raise NotFused("its norms of queries and keys are neither over a head nor over all")


def _in_order(norm: Norm, width: int, order: Tensor | None) -> Norm:
    """Return a norm with the columns of its heads in this order [D]."""
    if order is None or len(norm.weight) % width:
        return norm
    return replace(norm, weight=norm.weight.view(-1, width)[:, order].flatten())
