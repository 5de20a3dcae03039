"""Reads a model's size from its config.json and the headers of its safetensors; reads no weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.loading.model_path import WANTED, check_model_path
from outrider.protocol.errors import ModelError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODED = {"int8": 8.5, "int4": 4.5}
"""Bits of a number of a rounded linear layer, its share of a scale included."""
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Kinds of weights that can be run; others are quantized."""
MAX_HEADER = 100 << 20
"""Bytes; the format's own limit."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one model, in the arithmetic that it will run in."""

    name: str
    dtype: str
    parameters: int
    looked_up: int
    """Parameters of a table of input embeddings that is no output layer as well: no step reads it."""
    resting: int
    """Parameters of the experts that one token does not go through."""
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context_length: int
    vocabulary_size: int
    linear: int = 0
    """Parameters of linear layers but the output layer; experts are none."""
    head: int = 0
    """Numbers of the output layer."""
    tied: bool = False
    """The output layer is the table of input embeddings, and with codes a second copy of it."""
    weights: str = "full"
    """int8 or int4 where linear layers are rounded."""
    kv_dtype: str = "auto"
    """fp8 where keys and values are."""

    @property
    def weight_bytes(self) -> int:
        """All weights in memory."""
        plain = self.parameters - self._rounded + (self.head if self.tied and self._rounded else 0)
        return plain * BYTES[self.dtype] + self._coded_bytes

    def step_bytes(self, tokens: int) -> int:
        """What a step reads of them; several tokens may want every expert."""
        read = self.parameters - self.looked_up - (self.resting if tokens == 1 else 0) - self._rounded
        return read * BYTES[self.dtype] + self._coded_bytes

    @property
    def _rounded(self) -> int:
        """Parameters that a step reads as codes."""
        return self.linear + self.head if self.weights in CODED else 0

    @property
    def _coded_bytes(self) -> int:
        """Of all codes; the output layer has 8 bits at least."""
        if self.weights not in CODED:
            return 0
        return int(self.linear * CODED[self.weights] + self.head * CODED["int8"]) // 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        size = 1 if self.kv_dtype == "fp8" else BYTES[self.dtype]
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim) * size


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    kind: str
    elements: int
    axes: int


def read_checkpoint(
    folder: str, dtype: str = "auto", weights: str = "full", kv_dtype: str = "auto"
) -> ModelSizes:
    """The sizes of the model in a folder; `dtype` auto is the checkpoint's own. `weights` int8 or int4 are
    those of its linear layers once they are rounded; with `kv_dtype` fp8 keys and values take a byte each.

    Raises:
        ModelError: it is no folder of a model, or one whose weights cannot be run.
    """
    check_model_path(folder)
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"model: {folder!r} is a hub id and plan reads a folder; download it first")
    config, tensors = _config(path), list(_tensors(path))
    head_dim, value_dim = _widths(config)
    tied = _tied(tensors)
    return ModelSizes(
        name=path.resolve().name,
        dtype=_dtype(config, tensors) if dtype == "auto" else dtype,
        parameters=sum(one.elements for one in tensors),
        looked_up=_looked_up(tensors),
        resting=_resting(config, tensors),
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        context_length=getattr(config, "max_position_embeddings", None) or 0,
        vocabulary_size=config.vocab_size,
        linear=sum(one.elements for one in tensors if _is_linear(one)),
        head=sum(one.elements for one in tensors if (_is_embedding if tied else _is_head)(one.name)),
        tied=tied,
        weights=weights,
        kv_dtype=kv_dtype,
    )


def _widths(config: Any) -> tuple[int, int]:
    """Of a head's key and value; latent attention (DeepSeek) makes keys of two parts."""
    if (value_dim := getattr(config, "v_head_dim", None)) is not None:
        return config.qk_nope_head_dim + config.qk_rope_head_dim, value_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width


def _config(path: Path) -> Any:
    try:
        from transformers import AutoConfig  # which knows what each kind of model calls its sizes
    except ModuleNotFoundError as error:
        raise ModelError("plan needs transformers; pip install 'outrider[engine]'") from error
    if not (path / "config.json").is_file():
        raise ModelError(f"model: {str(path)!r} has no config.json; {WANTED}")
    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"model: config.json of {str(path)!r} cannot be read ({reason})") from error


def _tensors(path: Path) -> Iterator[_Tensor]:
    for file in _files(path):
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in STORED:
                raise ModelError(
                    f"model: {name} of {str(path)!r} is stored as {entry['dtype']}; use a checkpoint in "
                    f"{', '.join(BYTES)}"
                )
            yield _Tensor(name, entry["dtype"], math.prod(entry["shape"]), len(entry["shape"]))


def _files(path: Path) -> list[Path]:
    """The files that would be loaded: a folder may have the same weights a second time in another layout."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if single.is_file():
        return [single]
    raise ModelError(f"model: {str(path)!r} has no weights in safetensors; download or convert them")


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(
            f"model: {str(file)!r} is no safetensors file ({error}); download it again"
        ) from error
    return header


def _dtype(config: Any, tensors: list[_Tensor]) -> str:
    """The configuration's, else that of most weights."""
    named = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    if named in BYTES:
        return named
    counts: dict[str, int] = {}
    for one in tensors:
        counts[one.kind] = counts.get(one.kind, 0) + one.elements
    return STORED[max(counts, key=lambda kind: counts[kind])]


def _looked_up(tensors: list[_Tensor]) -> int:
    """A tied table of embeddings is read as the output layer; one of its own is only looked up in."""
    return 0 if _tied(tensors) else sum(one.elements for one in tensors if _is_embedding(one.name))


def _resting(config: Any, tensors: list[_Tensor]) -> int:
    experts = sum(one.elements for one in tensors if ".experts." in one.name)
    return round(experts * (1.0 - _active_share(config)))


def _tied(tensors: list[_Tensor]) -> bool:
    return not any(_is_head(one.name) for one in tensors)


def _is_head(name: str) -> bool:
    return "lm_head" in name or "embed_out" in name


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))


def _is_linear(one: _Tensor) -> bool:
    """True for a weight of two axes that is neither of the vocabulary, nor of positions, nor an expert's."""
    others = _is_head(one.name) or _is_embedding(one.name) or one.name.endswith("wpe.weight")
    return one.axes == 2 and one.name.endswith(".weight") and not others and ".experts." not in one.name


def _active_share(config: Any) -> float:
    """Share of the experts that one token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    every = next((count for name in names if (count := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / every if every and active else 1.0
