"""Tiny quantized checkpoints in the layouts that are published, beside what their weights stand for.

Packing and its inverse are written out here number by number, apart from the code that is tested.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = ("_proj", ".w1", ".w2", ".w3")
"""How the names of quantized layers end; the last ones are of Mixtral's experts."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight neighbours."""


@dataclass
class Written:
    """A checkpoint, and the numbers [out, in] of each of its quantized layers, float32."""

    folder: Path
    numbers: dict[str, Tensor] = field(default_factory=dict)


Writer = Callable[[Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""From a weight [out, in] the tensors of a layer, and their numbers."""


def write(
    source: Path, folder: Path, settings: dict[str, Any], writer: Writer, *, head: bool = False
) -> Written:
    """A copy of a model with quantized linear layers, and with `head` an output layer of that kind too."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    made, kept, generator = Written(folder), {}, torch.Generator().manual_seed(7)
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        if last == "weight" and (module.endswith(LAYERS) or (head and module == "lm_head")):
            parts, made.numbers[module] = writer(tensor, generator)
            kept |= {f"{module}.{part}": held.contiguous() for part, held in parts.items()}
        else:
            kept[name] = tensor
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return made


def codes_for(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [out, G] of a weight; scales are of float16."""
    out, width = weight.shape
    groups = weight.view(out, width // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (1 << (bits - 1))).half().clamp(min=1e-6)
        zeros = torch.full_like(scales, 1 << (bits - 1)).int()
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().int().clamp(0, most)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, most).int().view(out, width), scales, zeros


def words_of(codes: Tensor, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """[N, M] codes -> [N, words] int32 along M; the code k of a word lies at `places[k]`, or k."""
    count = 32 // bits
    rows = codes.numpy().astype(np.uint64)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % count)))
    words = np.zeros((len(rows), rows.shape[1] // count), np.uint64)
    for column in range(rows.shape[1]):
        place = places[column % count] if places else column % count
        words[:, column // count] |= rows[:, column] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def numbers_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """What codes [out, in] stand for, `groups` [in] saying which scale a column has."""
    made = torch.empty(codes.shape, dtype=torch.float64)
    for column, group in enumerate(groups.tolist()):
        made[:, column] = (codes[:, column] - zeros[:, group]).double() * scales[:, group].double()
    return made.float()


def gptq(
    bits: int, group: int, *, version: int = 1, shuffled: bool = False, symmetric: bool = False
) -> Writer:
    """Of GPTQ; `shuffled` has groups in another order (desc_act)."""

    def writer(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        width = weight.shape[1]
        size = width if group < 0 else group
        codes, scales, zeros = codes_for(weight, bits, size, symmetric=symmetric)
        zeros = zeros.clamp(min=1)  # the first version stores zeros less one
        groups = torch.arange(width) // size
        if shuffled:
            groups = groups[torch.randperm(width, generator=generator)]
        parts = {
            "qweight": words_of(codes, bits).t(),
            "qzeros": words_of(zeros.t() - (1 if version == 1 else 0), bits),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        return parts, numbers_of(codes, scales, zeros, groups)

    return writer


def awq(group: int) -> Writer:
    """Of AWQ's GEMM version."""

    def writer(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = codes_for(weight, 4, group, symmetric=False)
        parts = {
            "qweight": words_of(codes.t(), 4, AWQ_PLACES),
            "qzeros": words_of(zeros.t(), 4, AWQ_PLACES),
            "scales": scales.t(),
        }
        return parts, numbers_of(codes, scales, zeros, torch.arange(weight.shape[1]) // group)

    return writer


def packed(bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False) -> Writer:
    """Of compressed-tensors, pack-quantized; a group of -1 is a row (channel)."""

    def writer(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        width = weight.shape[1]
        size = width if group < 0 else group
        codes, scales, zeros = codes_for(weight, bits, size, symmetric=symmetric)
        scales = scales.bfloat16()
        groups = torch.arange(width) // size
        parts = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words_of(zeros.t(), bits).t()
        if shuffled:
            groups = groups[torch.randperm(width, generator=generator)]
            parts["weight_g_idx"] = groups.int()
        return parts, numbers_of(codes, scales, zeros, groups)

    return writer


def int8(*, whole: bool = False) -> Writer:
    """Of compressed-tensors, int-quantized: a scale for each row, or with `whole` for all of a weight."""

    def writer(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        if whole:
            scales = scales.amax().reshape(1)
        codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    return writer


def fp8(block: int = 0, *, name: str = "weight_scale", powers: bool = False) -> Writer:
    """Of fp8 with a scale for each row, or for each block; `powers` of two are stored as their exponents."""

    def writer(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        out, width = weight.shape
        high, wide = (block, block) if block else (1, width)
        scales = torch.empty(-(-out // high), -(-width // wide))
        stored, numbers = torch.empty(out, width, dtype=torch.float8_e4m3fn), torch.empty(out, width)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scales[i, j] = weight[part].abs().max() / 448
                if powers:
                    scales[i, j] = scales[i, j].log2().ceil().exp2()
                stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                numbers[part] = stored[part].float() * scales[i, j]
        exponents = (scales.log2() + 127).to(torch.uint8)
        held = exponents if powers else scales
        return {"weight": stored, name: held, "input_scale": torch.ones(1)}, numbers

    return writer


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
