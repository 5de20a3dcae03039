"""Finds the modules of a transformers model by the names that model families give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.nn.functional import gelu, relu, silu
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    SiLUActivation,
)
from transformers.pytorch_utils import Conv1D

from outrider.engine.fused_decoder.activation import Activation, gelu_tanh
from outrider.engine.fused_decoder.decoder import Norm
from outrider.engine.gpu.coded_linear import CodedLinear

Names: TypeAlias = tuple[str, ...]
_WEIGHT_PLUS_ONE = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
"""Norms whose factor is their weight and 1, in float32."""
_EXACT_WEIGHT = ("GptOssRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm")
"""Norms that round behind their weight, not before."""
_FUNCTIONS: tuple[tuple[tuple[type[nn.Module], ...], Activation], ...] = (
    ((nn.SiLU, SiLUActivation), silu),
    ((GELUActivation,), gelu),
    ((NewGELUActivation, FastGELUActivation, GELUTanh), gelu_tanh),
    ((nn.ReLU,), relu),
)
"""Activations that torch computes in one operation."""


class NotFused(Exception):
    """The model has parts that the fused decoder does not compute; the text names one."""


def child(parent: nn.Module, *names: str) -> nn.Module:
    """The module by the first of these names that there is.

    Raises:
        NotFused: there is none.
    """
    found = next((one for name in names if isinstance(one := getattr(parent, name, None), nn.Module)), None)
    if found is None:
        raise NotFused(f"{type(parent).__name__} has no {' or '.join(names)}")
    return found


def linear(parent: nn.Module, *names: str) -> nn.Module:
    """A linear layer; a subclass may compute something else.

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    if type(found) not in (nn.Linear, Conv1D, CodedLinear):
        raise NotFused(f"{_name_of(parent, found)} is a {type(found).__name__}")
    return found


def linears(parent: nn.Module, alternatives: Sequence[Names]) -> list[nn.Module]:
    """The linear layers by the first of these lists of names that there is.

    Raises:
        NotFused: there is none.
    """
    names = next((names for names in alternatives if hasattr(parent, names[0])), alternatives[-1])
    return [linear(parent, name) for name in names]


def embedding(parent: nn.Module, *names: str) -> nn.Embedding:
    """An embedding, whose own forward is used: Gemma's scales what it gives.

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    if not isinstance(found, nn.Embedding) or (
        type(found) is not nn.Embedding and not hasattr(found, "embed_scale")
    ):
        raise NotFused(f"{_name_of(parent, found)} is a {type(found).__name__}")
    return found


def norm(parent: nn.Module, *names: str) -> nn.Module:
    """A norm that `described` knows.

    Raises:
        NotFused: there is none.
    """
    found = child(parent, *names)
    kind = type(found).__name__
    layer_norm = type(found) is nn.LayerNorm and found.weight is not None and found.weight.ndim == 1
    rms_norm = kind in _WEIGHT_PLUS_ONE or (kind.endswith("RMSNorm") and hasattr(found, "variance_epsilon"))
    if not (layer_norm or rms_norm):
        raise NotFused(f"{_name_of(parent, found)} is a {kind}")
    return found


def described(module: Any) -> Norm:
    """What a norm computes."""
    weight = module.weight.detach()
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return Norm(weight, module.eps, centred=True, bias=bias)
    if type(module).__name__ in _WEIGHT_PLUS_ONE:
        return Norm(weight.float() + 1.0, module.eps)
    if type(module).__name__ in _EXACT_WEIGHT:
        weight = weight.float()
    return Norm(weight, module.variance_epsilon)


def activation(mlp: nn.Module, *names: str) -> Activation:
    """What an MLP activates with, as one operation where torch has it.

    Raises:
        NotFused: there is none.
    """
    found: Any = next((one for name in names if callable(one := getattr(mlp, name, None))), None)
    if found is None:
        raise NotFused("its MLP has no activation")
    return next((function for kinds, function in _FUNCTIONS if isinstance(found, kinds)), found)


def _name_of(parent: nn.Module, found: nn.Module) -> str:
    return next(name for name, one in parent.named_children() if one is found)
