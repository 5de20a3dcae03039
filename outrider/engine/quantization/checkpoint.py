"""Reads checkpoints with quantized weights: their format and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.engine.quantization import layouts
from outrider.engine.quantization.layouts import Layout, Parts, Read, Unreadable, is_fp8
from outrider.engine.quantization.planes import takes_planes
from outrider.engine.quantization.weight import QuantizedWeight
from outrider.protocol.errors import ModelError

LEFT_TO_TRANSFORMERS = frozenset({"mxfp4"})
"""Formats that transformers itself turns into 16 bits, on any device."""
Shapes: TypeAlias = Mapping[str, tuple[int, int]]
"""(out, in) of layers by their names."""
READABLE = "gptq and awq (gemm) with 4 or 8 bits, compressed-tensors with int4, int8 or fp8 weights, and fp8"
ROWS = (1, 0)
"""Blocks that are whole rows."""


@dataclass(slots=True)
class Checkpoint:
    """Tensors by name, as in a model without quantization, and the codes of the quantized ones."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[str, QuantizedWeight] = field(default_factory=dict)
    """The codes by the name of the module."""
    widened: int = 0
    """Number of layers whose codes were turned into numbers and dropped."""


def layout_of(model: str, config: Any) -> Layout | None:
    """Return how weights are stored according to a checkpoint's configuration; None where transformers reads
    them.

    Raises:
        ModelError: the format cannot be read.
    """
    given = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not given:
        return None
    settings: dict[str, Any] = given if isinstance(given, dict) else vars(given)
    method = str(settings.get("quant_method", "unknown"))
    if method in LEFT_TO_TRANSFORMERS:
        return None
    known = _KNOWN.get(method)
    made = known(settings) if known else f"the method {method}"
    if isinstance(made, str):
        raise unreadable(model, made)
    return made


def unreadable(model: str, what: str) -> ModelError:
    """Return the error for a checkpoint in an unknown format."""
    return ModelError(
        f"model: the weights of {model!r} are quantized in a way that is not read here: {what}. Readable are "
        f"{READABLE}; use such a checkpoint, or the one without quantization and weights int8 or int4"
    )


def read_checkpoint(
    model: str,
    layout: Layout,
    modules: Iterable[tuple[str, Parts]],
    dtype: torch.dtype,
    alone: Shapes | None = None,
) -> Checkpoint:
    """Return the tensors of a model's modules by their names; those of quantized layers as `dtype` and as
    codes.

    `alone` has the shapes of layers that keep only codes. These layers get zeros that take no memory in place
    of numbers, and codes that do not fit into planes become numbers.

    Raises:
        ModelError: a layer is stored in another way than the configuration says.
    """
    found = Checkpoint()
    for module, parts in modules:
        try:
            _take(found, layout, module, parts, dtype, alone)
        except (Unreadable, LookupError, RuntimeError) as error:
            reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
            raise unreadable(model, f"{layout.name}, layer {module} ({reason})") from error
    return found


def _take(
    found: Checkpoint,
    layout: Layout,
    module: str,
    parts: Parts,
    dtype: torch.dtype,
    alone: Shapes | None,
) -> None:
    if not layout.mark(frozenset(parts)):
        if any(is_fp8(part) for part in parts.values()):
            raise Unreadable("it has fp8 numbers, and scales of another name")
        if "weight" in parts and not parts["weight"].is_floating_point():
            raise Unreadable(f"its weights are {parts['weight'].dtype} without scales")
        found.tensors |= {f"{module}.{name}": part for name, part in parts.items()}
        return
    read = layout.read(parts)
    if isinstance(read, QuantizedWeight) and alone is not None and not takes_planes(read):
        read = read.values()
    if isinstance(read, QuantizedWeight):
        found.codes[module] = read
    else:
        found.widened += 1
    found.tensors[f"{module}.weight"] = _numbers(read, dtype, (alone or {}).get(module))
    if "bias" in parts:
        found.tensors[f"{module}.bias"] = parts["bias"].to(dtype)


def _numbers(read: Read, dtype: torch.dtype, alone: tuple[int, int] | None) -> Tensor:
    """Return the numbers of a layer, or zeros if it has codes of the shape `alone`."""
    if isinstance(read, Tensor):
        return read.to(dtype)
    return torch.zeros((), dtype=dtype).expand(alone) if read.shape == alone else read.values().to(dtype)


def _gptq(settings: Mapping[str, Any]) -> Layout | str:
    bits, version = settings.get("bits"), _version(settings, "checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        return f"gptq with {bits} bits in the format {version}"
    if settings.get("dynamic"):
        return "gptq with settings for single layers (dynamic)"
    group = settings.get("group_size", 128)
    if not _is_group(group):
        return f"gptq with group_size {group!r}"
    return layouts.gptq(bits, group, zeros_less_one=version == "gptq")


def _awq(settings: Mapping[str, Any]) -> Layout | str:
    bits = settings.get("bits", settings.get("w_bit"))
    version = _version(settings, "version", "gemm")
    if bits != 4 or version != "gemm" or settings.get("zero_point", True) is not True:
        return f"awq with {bits} bits, version {version}"
    group = settings.get("group_size", settings.get("q_group_size", 128))
    return layouts.awq(bits, group) if _is_group(group) else f"awq with group_size {group!r}"


def _version(settings: Mapping[str, Any], name: str, usual: str) -> str:
    """Return the version of a format by its setting, which newer checkpoints may call `format`."""
    return str(settings.get(name) or settings.get("format") or usual).lower()


def _is_group(size: object) -> bool:
    """Whether groups may have this size; -1 is a whole row."""
    return type(size) is int and (size > 0 or size == -1)


def _compressed_tensors(settings: Mapping[str, Any]) -> Layout | str:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        return f"compressed-tensors with sparse weights ({sparsity['format']})"
    if (settings.get("transform_config") or {}).get("config_groups"):
        return "compressed-tensors with transforms between layers"
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
    if settings.get("format") not in (*known, "dense"):
        return f"compressed-tensors in the format {settings.get('format')}"
    weights = [group.get("weights") for group in (settings.get("config_groups") or {}).values()]
    bits = [each.get("num_bits", 8) for each in weights if each]
    if settings["format"] == "pack-quantized" and any(each not in (4, 8) for each in bits):
        return f"compressed-tensors with {bits} bits"
    blocks = [_block_of(each) for each in weights if each]
    if not all(map(_is_block, blocks)):
        return f"compressed-tensors with blocks of {blocks}"
    return layouts.compressed_tensors(blocks)


def _block_of(weights: Mapping[str, Any]) -> Any:
    """Return how many rows, and numbers of a row, share a scale; 0: all of them."""
    group = weights.get("group_size")
    usual = "tensor" if group is None else "channel" if group == -1 else "group"
    match weights.get("strategy") or usual:
        case "tensor":
            return (0, 0)
        case "channel":
            return ROWS
        case "block":
            return weights.get("block_structure")
    return (1, group or None)


def _is_block(sizes: object) -> bool:
    return isinstance(sizes, list | tuple) and len(sizes) == 2 and all(map(_is_size, sizes))


def _is_size(size: object) -> bool:
    return type(size) is int and size >= 0


def _fp8(settings: Mapping[str, Any]) -> Layout | str:
    block = settings.get("weight_block_size")
    if not block:  # transformers' own are of 128
        return layouts.fp8([(0, 0), ROWS, (128, 128)])
    return layouts.fp8([tuple(block)]) if _is_block(block) else f"fp8 with weight_block_size {block!r}"


_KNOWN: dict[str, Callable[[Mapping[str, Any]], Layout | str]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: layouts.fp8([ROWS]),
}
