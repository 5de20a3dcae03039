"""Reads the config.json of an EAGLE-3 checkpoint, as SpecForge, SGLang and vLLM write and read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.engine.loading.config_faults import fault_of
from outrider.protocol.allowance import MAX_FEATURE_LAYERS
from outrider.protocol.errors import ModelError

KINDS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Architectures that config.json may name."""
NESTED = "transformer_layer_config"
"""The field in which vLLM's speculators keep the sizes of the layer."""
UNKNOWN = {"norm_before_fc": False, "parallel_drafting": False, "mlp_bias": False}
"""Settings that change the computation, each with the only value that is supported here."""


class HeadConfig(BaseModel):
    """The sizes of a head; names as in config.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(gt=0)
    target_hidden_size: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    attention_bias: bool = False
    norm_before_residual: bool = False
    """True where the layer adds to its normed feature, not to the feature itself."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose inputs are read, in the order of the columns of `fc`."""
    rotary: Mapping[str, Any]
    """What transformers' Llama needs to know about its rotary positions."""


def is_head(config: Mapping[str, Any]) -> bool:
    """True when a config.json is that of an EAGLE-3 head."""
    given = config.get("architectures")
    named = isinstance(given, list) and any(kind in given for kind in KINDS)
    return named or config.get("speculators_model_type") == "eagle3"


def describe_head(model: str, config: Mapping[str, Any], target: Mapping[str, Any]) -> HeadConfig:
    """Return the head that `config` describes, for the target that `target` describes.

    Raises:
        ModelError: it is no head, or one that computes in an unknown way; the text names the setting.
    """
    if not is_head(config):
        raise ModelError(
            f"model: {model!r} is no EAGLE-3 head: its config.json names none of {', '.join(KINDS)}"
        )
    flat = {**config, **(config.get(NESTED) or {})}
    eagle = config.get("eagle_config") or {}
    _refuse_unknown(model, flat, eagle)
    if fault := fault_of(flat):
        raise _wrong(model, fault)
    share = (flat.get("hidden_size") or 0) // (flat.get("num_attention_heads") or 1)
    flat |= {
        "head_dim": flat.get("head_dim") or share,
        "num_key_value_heads": flat.get("num_key_value_heads") or flat.get("num_attention_heads"),
        "draft_vocab_size": flat.get("draft_vocab_size") or flat.get("vocab_size"),
        "target_hidden_size": flat.get("target_hidden_size") or flat.get("hidden_size"),
        "feature_layers": _feature_layers(model, config, eagle, target),
        "rotary": _rotary(flat),
    }
    try:
        return HeadConfig.model_validate(flat)
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(model, f"{first['loc'][0]}: {first['msg']}") from error


def _wrong(model: str, fault: str) -> ModelError:
    return ModelError(f"model: config.json of {model!r}: {fault}; repair it")


def _refuse_unknown(model: str, config: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    wrong = {name: config[name] for name, known in UNKNOWN.items() if config.get(name, known) != known}
    if config.get("num_hidden_layers", 1) != 1:
        wrong["num_hidden_layers"] = config["num_hidden_layers"]
    if eagle.get("use_aux_hidden_state", True) is not True:
        wrong["eagle_config.use_aux_hidden_state"] = False
    if config.get("hidden_act", "silu") != "silu":
        wrong["hidden_act"] = config["hidden_act"]
    for name, value in wrong.items():
        raise ModelError(
            f"model: {model!r} has {name} = {value!r}, which is not computed here; use another head"
        )


def _feature_layers(
    model: str, config: Mapping[str, Any], eagle: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the layers whose inputs are read.

    `eagle_config` names layers whose outputs are read (SpecForge, SGLang), the top-level setting layers whose
    inputs are read (vLLM). Without either, they are those of the EAGLE-3 paper's code.
    """
    count = int((target.get("text_config") or target).get("num_hidden_layers", 0))
    name = "eagle_aux_hidden_state_layer_ids"
    read, fed = eagle.get(name) or [], config.get(name) or []
    for given in (read, fed):
        if not isinstance(given, list) or any(type(layer) is not int for layer in given):
            raise _wrong(model, f"{name} is {given!r}, and must be a list of whole numbers")
    layers = [layer + 1 for layer in read] or fed
    layers = layers or [2, count // 2, count - 3]
    if len(set(layers)) > MAX_FEATURE_LAYERS or not 0 <= min(layers) <= max(layers) < count:
        raise ModelError(
            f"model: {model!r} reads what goes into layers {layers}, and the target has the layers 0 to "
            f"{count - 1}; set {name} in its config.json to those that it was trained with, at most "
            f"{MAX_FEATURE_LAYERS}"
        )
    return tuple(layers)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    return {name: config[name] for name in names if config.get(name) is not None}
