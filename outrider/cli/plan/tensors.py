"""The tensors of a checkpoint, from the headers of its safetensors files, and what each is for."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.plan.sizes import BYTES, FP8
from outrider.protocol.errors import ModelError

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": FP8}
"""Types of safetensors weights, and our names for them; weights of other types are quantized."""
SCALES = {"weight_scale", "weight_scale_inv", "input_scale", "q_scale", "k_scale", "v_scale"}
"""Names of tensors that scale quantized weights or cached numbers, and are no weights themselves."""
MAX_HEADER = 100 << 20
"""Most bytes of a safetensors header: the format's own limit."""
MTP = re.compile(r"^(?:model\.)?(?:mtp\.|(?:language_model\.)?layers\.(\d+)\.)")
"""Names of MTP layers, and of the target's own layers with their number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file describes it."""

    name: str
    kind: str
    """Its type, one of `STORED`."""
    elements: int
    axes: int


def tensors_of(path: Path, layers: int) -> Iterator[StoredTensor]:
    """The tensors of a target with `layers` layers, in the folder `path`; its MTP layers are not its own.

    Raises:
        ModelError: a file is no whole safetensors file, or has a type that cannot be run.
    """
    from outrider.engine.loading.open_weights import weight_files

    for file in weight_files(str(path)):
        for name, entry in _header(file).items():
            if name == "__metadata__" or name.rpartition(".")[2] in SCALES or _is_mtp(name, layers):
                continue
            if entry["dtype"] not in STORED:
                raise ModelError(
                    f"model: {name} of {str(path)!r} is stored as {entry['dtype']}; use a checkpoint in "
                    f"{', '.join(BYTES)}"
                )
            yield StoredTensor(name, entry["dtype"], math.prod(entry["shape"]), len(entry["shape"]))


def _is_mtp(name: str, layers: int) -> bool:
    found = MTP.match(name)
    return found is not None and (found[1] is None or int(found[1]) >= layers)


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        stored = [entry for entry in header.values() if "dtype" in entry]
        sizes = [(entry["data_offsets"][1], math.prod(entry["shape"])) for entry in stored]
        whole = 8 + length + max(sizes)[0]
        if file.stat().st_size < whole:
            raise ValueError(f"it has {file.stat().st_size} of {whole} bytes")
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model: {str(file)!r} is no whole safetensors file ({error}); download it again"
        ) from error
    return header


def looked_up(tensors: list[StoredTensor]) -> int:
    """Parameters of the table of embeddings; 0 if it is tied, since it is then read as the output layer."""
    tied = is_tied(tensors)
    return sum(
        one.elements for one in tensors if _of_layers(one.name) or (is_embedding(one.name) and not tied)
    )


def is_tied(tensors: list[StoredTensor]) -> bool:
    """True if the output layer is the table of input embeddings."""
    return not any(is_head(one.name) for one in tensors)


def is_head(name: str) -> bool:
    """True for the output layer."""
    return "lm_head" in name or "embed_out" in name


def is_embedding(name: str) -> bool:
    """True for the table of input embeddings."""
    return name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"))


def _of_layers(name: str) -> bool:
    """True for the embedding table of the per-layer inputs (Gemma 4)."""
    return name.endswith("embed_tokens_per_layer.weight")


def is_linear(one: StoredTensor) -> bool:
    """True for a weight of two axes that belongs neither to the vocabulary, nor to positions, nor to an
    expert."""
    others = is_head(one.name) or is_embedding(one.name) or one.name.endswith("wpe.weight")
    others = others or _of_layers(one.name)
    return one.axes == 2 and one.name.endswith(".weight") and not others and not of_experts(one.name)


def is_expert(one: StoredTensor) -> bool:
    """True for the weight of an expert's layer, or of all experts' together."""
    return one.axes > 1 and of_experts(one.name) and not one.name.endswith("bias")


def of_experts(name: str) -> bool:
    """True for what belongs to an expert."""
    return ".experts." in name
