"""Reads a model's size from its config.json and the headers of its safetensors; reads no weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.loading.model_path import WANTED, check_model_path
from outrider.protocol.errors import ModelError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8 = "fp8"
CODED = {"int8": 8.5, "int4": 4.5, FP8: 8.25}
"""Bits per number of a linear layer that is stored as codes, its share of a scale included."""
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": FP8}
"""Types of safetensors weights, and our names for them; weights of other types are quantized."""
SCALES = {"weight_scale", "weight_scale_inv", "input_scale", "q_scale", "k_scale", "v_scale"}
"""Names of tensors that scale quantized weights or cached numbers, and are no weights themselves."""
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "conv", "moe", "mlp"}
"""Kinds of layers without attention, as configurations name them."""
_WITHOUT_LATENTS = ("kimi_linear", "bailing_hybrid", "minicpm3", "longcat_flash")
"""Models with latent attention that run as their own modules. These pass whole keys and values to
attention."""
MAX_HEADER = 100 << 20
"""Most bytes of a safetensors header: the format's own limit."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one model, in the arithmetic that it will run in."""

    name: str
    dtype: str
    parameters: int
    looked_up: int
    """Parameters of a table of input embeddings that is not the output layer too: no step reads all of it."""
    kv_numbers: int
    """Numbers of the keys and values of one token in all layers, or of the latents that they are made of."""
    context_length: int
    vocabulary_size: int
    linear: int = 0
    """Parameters of linear layers that may be stored as codes, without the output layer and experts."""
    experts: int = 0
    """Parameters of experts."""
    active: float = 1.0
    """Share of the experts' parameters that one token goes through."""
    coded_experts: int = 0
    """Parameters of experts that may be stored as codes; on a GPU they have 16 bits instead."""
    head: int = 0
    """Parameters of the output layer."""
    tied: bool = False
    """Whether the output layer is the table of input embeddings; as codes it is a second copy of it."""
    weights: str = "full"
    """int8 or int4 if linear layers are rounded, fp8 if the checkpoint stores them so."""
    kv_dtype: str = "auto"
    """fp8 if keys and values are stored in fp8."""
    whole_kv_numbers: int = 0
    """Numbers of whole keys and values, which GPUs keep, if `kv_numbers` are those of latents."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._bytes(self.parameters + (self._coded_head if self.tied else 0), 1.0)

    def step_bytes(self, tokens: int) -> int:
        """Bytes of weights that a step over `tokens` reads; several tokens may need every expert."""
        share = self.active if tokens == 1 else 1.0
        resting = round(self.experts * (1.0 - share))
        return self._bytes(self.parameters - self.looked_up - resting, share)

    def _bytes(self, numbers: int, share: float) -> int:
        """Bytes of some of the parameters, among which are this share of the experts'."""
        if self.weights not in CODED:
            return numbers * BYTES[self.dtype]
        inside, head = self.linear + round(self.coded_experts * share), self._coded_head
        codes = int(inside * CODED[self.weights] + head * CODED["int8"]) // 8
        return (numbers - inside - head) * BYTES[self.dtype] + codes

    @property
    def _coded_head(self) -> int:
        """Parameters of the output layer that are codes, of at least 8 bits; checkpoints in fp8 have none."""
        return self.head if self.weights in CODED and self.weights != FP8 else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.kv_numbers * (1 if self.kv_dtype == FP8 else BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    kind: str
    elements: int
    axes: int


def read_checkpoint(
    folder: str, dtype: str = "auto", weights: str = "full", kv_dtype: str = "auto"
) -> ModelSizes:
    """The sizes of the model in a folder; `dtype` auto is the checkpoint's own. With `weights` int8 or int4
    its linear layers are rounded; with `kv_dtype` fp8 keys and values take a byte each.

    Raises:
        ModelError: the folder holds no model, or one whose weights cannot be run.
    """
    check_model_path(folder)
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"model: {folder!r} is a hub id and plan reads a folder; download it first")
    config, tensors = _config(path), list(_tensors(path))
    tied, layers = _tied(tensors), [one for one in tensors if _is_linear(one) or _is_expert(one)]
    if weights == "full" and any(STORED[one.kind] == FP8 for one in layers):
        weights, layers = FP8, [one for one in layers if STORED[one.kind] == FP8]
    return ModelSizes(
        name=path.resolve().name,
        dtype=_dtype(config, tensors) if dtype == "auto" else dtype,
        parameters=sum(one.elements for one in tensors),
        looked_up=_looked_up(tensors),
        kv_numbers=_kv_numbers(config, _layer_numbers),
        context_length=_context(config),
        vocabulary_size=config.vocab_size,
        linear=sum(one.elements for one in layers if not _is_expert(one)),
        experts=sum(one.elements for one in tensors if _of_experts(one.name)),
        active=_active_share(config),
        coded_experts=sum(one.elements for one in layers if _is_expert(one)),
        head=sum(one.elements for one in tensors if (_is_embedding if tied else _is_head)(one.name)),
        tied=tied,
        weights=weights,
        kv_dtype=kv_dtype,
        whole_kv_numbers=_kv_numbers(config, _whole_numbers),
    )


def _kv_numbers(config: Any, of_layer: Callable[[Any], int]) -> int:
    """Numbers per token of all layers with attention, without those that use another layer's keys and
    values (Gemma 4)."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    return sum(
        of_layer(layer)
        for layer, mode, kind in zip(layers, modes, kinds, strict=True)
        if mode != "reuse" and kind not in _WITHOUT_ATTENTION
    )


def _context(config: Any) -> int:
    from outrider.engine.loading.model_config import context_limit  # this also imports transformers

    return context_limit(config) or 0


def _layer_numbers(config: Any) -> int:
    latent: int | None = getattr(config, "kv_lora_rank", None)
    if latent and config.model_type not in _WITHOUT_LATENTS:
        return latent + int(config.qk_rope_head_dim)
    return _whole_numbers(config)


def _whole_numbers(config: Any) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.model_type == "falcon" and (config.new_decoder_architecture or config.multi_query):
        heads = config.num_kv_heads if config.new_decoder_architecture else 1
    if getattr(config, "qk_nope_head_dim", None):  # in latent attention (DeepSeek), keys have two parts
        width: int = config.qk_nope_head_dim + config.qk_rope_head_dim
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    alibi = config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False)
    carried = 2 if alibi else 0  # extra columns of keys that hold their positions
    return int(heads * (width + carried + (getattr(config, "v_head_dim", None) or width)))


def _config(path: Path) -> Any:
    # It imports transformers, which knows the names that each kind of model has for its sizes.
    from outrider.engine.loading.model_config import read_config

    if not (path / "config.json").is_file():
        raise ModelError(f"model: {str(path)!r} has no config.json; {WANTED}")
    return read_config(str(path), trust_remote_code=False).get_text_config()


def _tensors(path: Path) -> Iterator[_Tensor]:
    from outrider.engine.loading.open_weights import weight_files

    for file in weight_files(str(path)):
        for name, entry in _header(file).items():
            if name == "__metadata__" or name.rpartition(".")[2] in SCALES:
                continue
            if entry["dtype"] not in STORED:
                raise ModelError(
                    f"model: {name} of {str(path)!r} is stored as {entry['dtype']}; use a checkpoint in "
                    f"{', '.join(BYTES)}"
                )
            yield _Tensor(name, entry["dtype"], math.prod(entry["shape"]), len(entry["shape"]))


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        whole = 8 + length + max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
        if file.stat().st_size < whole:
            raise ValueError(f"it has {file.stat().st_size} of {whole} bytes")
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model: {str(file)!r} is no whole safetensors file ({error}); download it again"
        ) from error
    return header


def _dtype(config: Any, tensors: list[_Tensor]) -> str:
    """The dtype of the configuration, otherwise that of most weights."""
    named = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    if named in BYTES:
        return named
    counts: dict[str, int] = {}
    for one in (one for one in tensors if STORED[one.kind] in BYTES):
        counts[one.kind] = counts.get(one.kind, 0) + one.elements
    return STORED[max(counts, key=lambda kind: counts[kind])]


def _looked_up(tensors: list[_Tensor]) -> int:
    """Parameters of the table of embeddings; 0 if it is tied, since it is then read as the output layer."""
    tied = _tied(tensors)
    return sum(
        one.elements for one in tensors if _of_layers(one.name) or (_is_embedding(one.name) and not tied)
    )


def _tied(tensors: list[_Tensor]) -> bool:
    return not any(_is_head(one.name) for one in tensors)


def _is_head(name: str) -> bool:
    return "lm_head" in name or "embed_out" in name


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"))


def _of_layers(name: str) -> bool:
    """True for the embedding table of the per-layer inputs (Gemma 4)."""
    return name.endswith("embed_tokens_per_layer.weight")


def _is_linear(one: _Tensor) -> bool:
    """True for a weight of two axes that belongs neither to the vocabulary, nor to positions, nor to an
    expert."""
    others = _is_head(one.name) or _is_embedding(one.name) or one.name.endswith("wpe.weight")
    others = others or _of_layers(one.name)
    return one.axes == 2 and one.name.endswith(".weight") and not others and not _of_experts(one.name)


def _is_expert(one: _Tensor) -> bool:
    """True for the weight of an expert's layer, or of all experts' together."""
    return one.axes > 1 and _of_experts(one.name) and not one.name.endswith("bias")


def _of_experts(name: str) -> bool:
    return ".experts." in name


def _active_share(config: Any) -> float:
    """Share of the experts that one token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    every = next((count for name in names if (count := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / every if every and active else 1.0
