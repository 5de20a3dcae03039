"""The tensors of an EAGLE-3 head, and those that it shares with its target. Every one has its place, or is
named in an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.eagle.description import HeadConfig, describe_head
from outrider.engine.loading.model_path import cannot_load
from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = "layers.0."
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OPTIONAL = ("d2t", "t2d", EMBEDDING, OUTPUT)


def read_head(model: str, target: str) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head and its tensors by their names without `model.`, the layer's under `layers.0.`;
    `embed_tokens.weight`, `lm_head.weight` and `d2t` are always there, the target's own where the head shares
    them.

    Raises:
        ModelError: a file is missing or no safetensors, or a tensor is missing, unknown or of another shape.
    """
    config = describe_head(model, json_file(model, "config.json"), json_file(target, "config.json"))
    found = {_plain(name): tensor for name, tensor in _tensors(model)}
    shapes = _shapes(config)
    for name in found:
        if name not in shapes:
            raise ModelError(
                f"model: {model!r} has a tensor {name!r} that an EAGLE-3 head has not; use another head"
            )
    if EMBEDDING not in found:
        found[EMBEDDING] = _shared(target, "embed_tokens.weight")
    if OUTPUT not in found:
        found[OUTPUT] = _shared(target, "lm_head.weight", "embed_tokens.weight")
    found.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    for name, shape in shapes.items():
        _check(model, name, found.get(name), shape)
    _check_map(model, found["d2t"], config)
    return config, found


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """What a head consists of."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.feature_layers) * config.target_hidden_size),
        "norm.weight": (width,),
        OUTPUT: (config.draft_vocab_size, width),
        EMBEDDING: (config.vocab_size, width),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
        LAYER + "self_attn.o_proj.weight": (width, queries),
        LAYER + "mlp.gate_proj.weight": (inner, width),
        LAYER + "mlp.up_proj.weight": (inner, width),
        LAYER + "mlp.down_proj.weight": (width, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{name}.weight"] = (width,)
    for name, count in rows.items():
        shapes[f"{LAYER}self_attn.{name}.weight"] = (count, 2 * width)
        if config.attention_bias:
            shapes[f"{LAYER}self_attn.{name}.bias"] = (count,)
    if config.attention_bias:
        shapes[LAYER + "self_attn.o_proj.bias"] = (width,)
    return shapes


def _check(model: str, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None:
        if name not in OPTIONAL:
            raise ModelError(
                f"model: {model!r} lacks the tensor {name!r} of an EAGLE-3 head; use a whole checkpoint"
            )
    elif tuple(tensor.shape) != shape:
        raise ModelError(
            f"model: the tensor {name!r} of {model!r} has the shape {list(tensor.shape)}, not "
            f"{list(shape)} as config.json says; use a head that was trained for this target"
        )


def _check_map(model: str, d2t: Tensor, config: HeadConfig) -> None:
    """Every token of the draft must be one of the target's: its id is its own plus the entry of `d2t`."""
    tokens = d2t + torch.arange(config.draft_vocab_size)
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ModelError(
            f"model: the tensor 'd2t' of {model!r} leads out of the vocabulary of {config.vocab_size}"
        )


def _plain(name: str) -> str:
    """One name for what SpecForge, SGLang and vLLM name differently."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _tensors(model: str) -> Iterator[tuple[str, Tensor]]:
    for path in _files(model):
        with _opened(model, path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield name, file.get_tensor(name)


def _shared(target: str, *endings: str) -> Tensor:
    """The first tensor of the target with one of these endings, the first ending first."""
    for ending in endings:
        for path in _files(target):
            with _opened(target, path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if name == ending or name.endswith("." + ending):
                        tensor: Tensor = file.get_tensor(name)
                        return tensor
    raise ModelError(
        f"target: {target!r} has no tensor {endings[0]!r}, which the head does not bring; use a whole head"
    )


def _opened(model: str, path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise cannot_load(model, f"cannot be read ({path.name}: {error})") from error


def _files(model: str) -> Sequence[Path]:
    """The weight files of a folder or hub id."""
    index: Mapping[str, str] = json_file(model, INDEX).get("weight_map", {})
    names = sorted(set(index.values())) or [SINGLE]
    found = [_path(model, name) for name in names]
    if None in found:
        raise cannot_load(
            model,
            f"has no {names[found.index(None)]}; convert other formats with safetensors where you trust them",
        )
    return [path for path in found if path is not None]


def _path(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file  # slow to import, and needed for hub ids alone

    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise cannot_load(
            model, f"has no {name} that can be fetched ({str(error).splitlines()[0]})"
        ) from error
    return None if found is None else Path(found)
