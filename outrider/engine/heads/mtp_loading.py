"""Loads the first MTP layer of a target's checkpoint, with transformers' modules and names of weights.

A checkpoint keeps its MTP layers after the target's layers (`model.layers.61.`, DeepSeek and GLM) or apart
(`mtp.`, Qwen). The target's other layers are neither read nor computed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from outrider.engine.fused_decoder.joining import linear_of
from outrider.engine.heads.mtp_head import MtpHead
from outrider.engine.loading.model_config import LOAD_ERRORS, read_config, skeleton_of, unreadable
from outrider.engine.loading.open_weights import LAYERS, MTP, ONE_FILE, OpenWeights, by_module
from outrider.engine.loading.stored import dtype_of, without_quantization
from outrider.engine.loading.weights_version import CHARACTERS
from outrider.engine.quantization.checkpoint import layout_of, read_checkpoint
from outrider.engine.quantization.layouts import Layout
from outrider.protocol.errors import ModelError

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
_ATTENTION = {"full_attention", "sliding_attention"}
_NAMES_APART = {
    r"^layers\.0\.(?!(?:mtp_block|enorm|hnorm|eh_proj|post_norm)\.)": "layers.0.mtp_block.",
    r"^fc\.": "layers.0.eh_proj.",
    r"^pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"^pre_fc_norm_hidden\.": "layers.0.hnorm.",
    r"^norm\.": "layers.0.post_norm.",
}
"""Qwen's names and those of `MtpModel`, which transformers 5.17 does not know."""


def read_mtp(model: str, dtype: str, device: torch.device) -> MtpHead:
    """Return the first MTP layer of the target in the folder or hub id `model`. Quantized weights become the
    numbers that they stand for.

    Raises:
        ModelError: the target has none, or one that does not run here; the text says which.
    """
    config = read_config(model, trust_remote_code=False)
    text, layout = config.get_text_config(), layout_of(model, config)
    _describe_first(model, text)
    config.dtype = text.dtype = dtype_of(config, dtype)
    names = _names_of_mtp(text.num_hidden_layers)
    found = _tensors(model, layout, names, text.dtype)
    main = skeleton_of(model, without_quantization(config), trust_remote_code=False)
    try:
        with _folder_of(model, layout, found, names) as folder:
            loaded = _load(main, folder, names, device)
        rotary = _rotary_of(main, text, device)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error
    return MtpHead(
        loaded.layers[0].requires_grad_(False),
        loaded.config,
        rotary,
        _embedding_of(_named(model, found, EMBEDDING).to(device, text.dtype)),
        linear_of(_output_layer(model, found, text).to(device, text.dtype), None),
        text.num_hidden_layers,
    ).eval()


def mtp_version(model: str) -> str:
    """Return the beginning of a hash of the first MTP layer's weights. The target's other weights, which may
    be a hundred times as many, are not read.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    layers = read_config(model, trust_remote_code=False).get_text_config().num_hidden_layers
    names, digest = _names_of_mtp(layers), hashlib.sha256()
    with OpenWeights(model) as opened:
        for name in sorted(name for name in opened.weights if re.search(names, name)):
            numbers = opened.weights[name][...].contiguous().view(-1).view(torch.uint8)
            digest.update(b"\0" + name.encode() + b"\0" + numbers.numpy().tobytes())
    return digest.hexdigest()[:CHARACTERS]


def _names_of_mtp(layers: int) -> str:
    """Return a pattern of the names of the first MTP layer's weights, after a target's `layers`."""
    return rf"{MTP}(?!layers\.[1-9])|{LAYERS}{layers}\."


def _tensors(model: str, layout: Layout | None, names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the target's embedding and output layer, and its MTP layer if it is quantized.

    Raises:
        ModelError: there is no MTP layer.
    """
    with OpenWeights(model) as opened:
        modules = by_module(opened.weights)
        mtp = {module for module in modules if re.search(names, f"{module}.")}
        if not mtp:
            raise ModelError(f"model: {model!r} has no MTP layer; use another draft, such as lookup")
        wanted = {module for module in modules if f"{module}.weight".endswith((EMBEDDING, OUTPUT))}
        if layout is not None:
            wanted |= mtp
        parts = {module: {name: part[...] for name, part in modules[module].items()} for module in wanted}
        if layout is not None:
            return read_checkpoint(model, layout, parts.items(), dtype).tensors
        return {f"{module}.{name}": part for module in parts for name, part in parts[module].items()}


@contextmanager
def _folder_of(model: str, layout: Layout | None, found: Mapping[str, Tensor], names: str) -> Iterator[str]:
    """A folder, or hub id, with the MTP layer's weights as numbers; a temporary one for quantized weights."""
    if layout is None:
        yield model
        return
    with TemporaryDirectory(prefix="outrider-mtp-") as folder:
        own = {name: tensor.contiguous() for name, tensor in found.items() if re.search(names, name)}
        save_file(own, Path(folder) / ONE_FILE, {"format": "pt"})
        yield folder


def _output_layer(model: str, found: Mapping[str, Tensor], text: Any) -> Tensor:
    tied = text.tie_word_embeddings and not any(name.endswith(OUTPUT) for name in found)
    return _named(model, found, EMBEDDING if tied else OUTPUT)


def _named(model: str, found: Mapping[str, Tensor], ending: str) -> Tensor:
    """Return the weight with this ending and the shortest name: MTP layers may have copies."""
    names = sorted((name for name in found if name.endswith(ending)), key=len)
    if not names:
        raise ModelError(f"model: {model!r} has no tensor {ending!r}; use a whole checkpoint")
    return found[names[0]]


def _describe_first(model: str, text: Any) -> None:
    """Say in a configuration that there is one MTP layer, and of which kinds it is."""
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = list(getattr(text, "mtp_layer_types", None) or ["full_attention"])[:1]
        if not _ATTENTION.issuperset(text.mtp_layer_types):
            raise ModelError(
                f"model: the MTP layer of {model!r} is of the kind {text.mtp_layer_types[0]!r}, which does "
                "not run here; use another draft"
            )
    if getattr(text, "mlp_layer_types", None):
        kinds = getattr(text, "mtp_mlp_layer_types", None) or text.mlp_layer_types[-1:]
        text.mtp_mlp_layer_types = list(kinds)[:1]


def _load(main: PreTrainedModel, folder: str, names: str, device: torch.device) -> Any:
    """Return transformers' `MtpModel` with its weights, beside the target's modules without weights.

    Raises:
        ModelError: this version of transformers has no MTP layers.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ModelError("kind: mtp needs a newer transformers; install the locked version") from error
    found: Any = main
    found.config.name_or_path = folder
    found._keys_to_ignore_on_load_unexpected = [names]  # which names MtpModel takes for MTP weights
    renamings = [WeightRenaming(own, theirs) for own, theirs in _NAMES_APART.items()]
    found._weight_conversions = [*renamings, *get_model_conversion_mapping(main)]
    return MtpModel.from_pretrained(found, device_map={"": str(device)})


def _embedding_of(weight: Tensor) -> nn.Embedding:
    tokens, width = weight.shape
    return nn.Embedding(tokens, width, _weight=weight, _freeze=True)


def _rotary_of(main: PreTrainedModel, text: Any, device: torch.device) -> nn.Module:
    """Return rotary positions as the target's."""
    decoder: Any = main.get_decoder()  # type: ignore[no-untyped-call]
    rotary: nn.Module = type(decoder.rotary_emb)(text).to(device)
    return rotary
