"""Reads a model's size from its config.json and the headers of its safetensors; reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.cli.plan.kv_numbers import kept_numbers, whole_numbers
from outrider.cli.plan.sizes import BYTES, FP8, ModelSizes
from outrider.cli.plan.tensors import (
    STORED,
    StoredTensor,
    is_embedding,
    is_expert,
    is_head,
    is_linear,
    is_tied,
    looked_up,
    of_experts,
    tensors_of,
)
from outrider.engine.loading.model_path import WANTED, check_model_path
from outrider.protocol.errors import ModelError


def read_checkpoint(
    folder: str, dtype: str = "auto", weights: str = "full", kv_dtype: str = "auto"
) -> ModelSizes:
    """The sizes of the model in a folder; `dtype` auto is the checkpoint's own. With `weights` int8 or int4
    its linear layers are rounded; with `kv_dtype` fp8 keys and values take a byte each.

    Raises:
        ModelError: the folder holds no model, or one that cannot run here.
    """
    check_model_path(folder)
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"model: {folder!r} is a hub id and plan reads a folder; download it first")
    config = _config(path)
    tensors = list(tensors_of(path, config.num_hidden_layers))
    tied, layers = is_tied(tensors), [one for one in tensors if is_linear(one) or is_expert(one)]
    if weights == "full" and any(STORED[one.kind] == FP8 for one in layers):
        weights, layers = FP8, [one for one in layers if STORED[one.kind] == FP8]
    return ModelSizes(
        name=path.resolve().name,
        dtype=_dtype(config, tensors) if dtype == "auto" else dtype,
        parameters=sum(one.elements for one in tensors),
        looked_up=looked_up(tensors),
        kv_numbers=kept_numbers(config),
        context_length=_context(config),
        vocabulary_size=config.vocab_size,
        linear=sum(one.elements for one in layers if not is_expert(one)),
        experts=sum(one.elements for one in tensors if of_experts(one.name)),
        active=_active_share(config),
        coded_experts=sum(one.elements for one in layers if is_expert(one)),
        head=sum(one.elements for one in tensors if (is_embedding if tied else is_head)(one.name)),
        tied=tied,
        weights=weights,
        kv_dtype=kv_dtype,
        whole_kv_numbers=whole_numbers(config),
    )


def _config(path: Path) -> Any:
    # They import transformers, which knows the names that each kind of model has for its sizes.
    from outrider.engine.loading.model_config import read_config, skeleton_of
    from outrider.engine.loading.stored import without_quantization

    if not (path / "config.json").is_file():
        raise ModelError(f"model: {str(path)!r} has no config.json; {WANTED}")
    config = read_config(str(path), trust_remote_code=False)
    skeleton_of(str(path), without_quantization(config), trust_remote_code=False)
    return config.get_text_config()


def _context(config: Any) -> int:
    from outrider.engine.loading.model_config import context_limit  # this also imports transformers

    return context_limit(config) or 0


def _dtype(config: Any, tensors: list[StoredTensor]) -> str:
    """The dtype of the configuration, otherwise that of most weights."""
    named = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    if named in BYTES:
        return named
    counts: dict[str, int] = {}
    for one in (one for one in tensors if STORED[one.kind] in BYTES):
        counts[one.kind] = counts.get(one.kind, 0) + one.elements
    return STORED[max(counts, key=lambda kind: counts[kind])]


def _active_share(config: Any) -> float:
    """Share of the experts that one token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    every = next((count for name in names if (count := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / every if every and active else 1.0
