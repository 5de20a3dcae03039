"""Finds the modules of a transformers model by the names that model families give them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.nn.functional import gelu, relu, silu
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
)
from transformers.pytorch_utils import Conv1D

from outrider.engine.fused_decoder.activation import Activation, gelu_tanh, relu_squared
from outrider.engine.gpu.coded_linear import CodedLinear

Names: TypeAlias = tuple[str, ...]
_FUNCTIONS: tuple[tuple[tuple[type[nn.Module], ...], Activation], ...] = (
    ((nn.SiLU, SiLUActivation), silu),
    ((GELUActivation,), gelu),
    ((NewGELUActivation, FastGELUActivation, GELUTanh), gelu_tanh),
    ((nn.ReLU,), relu),
    ((ReLUSquaredActivation,), relu_squared),
)
"""Classes of activations, and the functions that compute them in few operations of torch."""
_NORMS = ("Norm", "Norm1P")
"""How the names of norms' classes end."""
TOLERANCE = 0.02
"""Largest accepted relative distance of a module's result from that of what it is taken for. Rounding to 16
bits makes less than 0.01."""


class NotFused(Exception):
    """The model has parts that the fused decoder does not compute; the text names one."""


def child(parent: nn.Module, *names: str) -> nn.Module:
    """Return the module with the first of these names that exists.

    Raises:
        NotFused: there is none.
    """
    found = next((one for name in names if isinstance(one := getattr(parent, name, None), nn.Module)), None)
    if found is None:
        raise NotFused(f"{type(parent).__name__} has no {' or '.join(names)}")
    return found


def linear(parent: nn.Module, *names: str) -> nn.Module:
    """Return a linear layer. Subclasses are refused: they may compute something else.

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    if type(found) not in (nn.Linear, Conv1D, CodedLinear):
        raise NotFused(f"{_name_of(parent, found)} is a {type(found).__name__}")
    return found


def linears(parent: nn.Module, alternatives: Sequence[Names]) -> list[nn.Module]:
    """Return the linear layers of the first of these lists of names whose modules all exist.

    Raises:
        NotFused: there is none.
    """
    there = (names for names in alternatives if all(map(partial(_has, parent), names)))
    names = next(there, alternatives[-1])
    return [linear(parent, name) for name in names]


def _has(parent: nn.Module, name: str) -> bool:
    return isinstance(getattr(parent, name, None), nn.Module)


def embedding(parent: nn.Module, *names: str) -> nn.Embedding:
    """Return an embedding of tokens or positions. Its own forward is used, because Gemma's scales its result.

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    known = type(found) is nn.Embedding or hasattr(found, "embed_scale") or hasattr(found, "offset")
    if not isinstance(found, nn.Embedding) or not known:
        raise NotFused(f"{_name_of(parent, found)} is a {type(found).__name__}")
    return found


def from_position_0(embedding: nn.Embedding) -> nn.Embedding:
    """Return an embedding of positions without the rows before that of position 0 (OPT)."""
    offset = getattr(embedding, "offset", 0)
    if not offset:
        return embedding
    rows = embedding.weight.detach()[offset:]
    return nn.Embedding(len(rows), rows.shape[1], _weight=rows, _freeze=True)


def norm(parent: nn.Module, *names: str) -> nn.Module:
    """Return a norm with a weight for each column, or without weights (OLMo 1).

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    weight: Any = getattr(found, "weight", None)
    shape = getattr(found, "normalized_shape", ()) if weight is None else weight.shape
    if not type(found).__name__.endswith(_NORMS) or len(shape) != 1:
        raise NotFused(f"{_name_of(parent, found)} is a {type(found).__name__}")
    return found


def activation(mlp: nn.Module, *names: str) -> Activation:
    """Return the activation of an MLP, as one operation where torch has one.

    Raises:
        NotFused: there is none.
    """
    found: Any = next((one for name in names if callable(one := getattr(mlp, name, None))), None)
    if found is None:
        raise NotFused("its MLP has no activation")
    return next((function for kinds, function in _FUNCTIONS if isinstance(found, kinds)), found)


def _name_of(parent: nn.Module, found: nn.Module) -> str:
    return next(name for name, one in parent.named_children() if one is found)
