"""The forward of a fused decoder for one token, with fewer launches than `fused_decoder.forward`.

    norm, and the product for queries, keys and values; rotation, storing and attention (three launches)
    output product, and the residual add
    norm, the product for gate and up, and the gate
    down product, and the residual add

Such a step takes as long as its weights take to read, so what matters is that the device always reads.
For more rows the library's products are faster.

Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from triton import next_power_of_2

from outrider.engine.fused_decoder.activation import NAMES
from outrider.engine.fused_decoder.decoder import FusedDecoder, FusedLayer, GatedMlp, LayerSettings, Norm
from outrider.engine.fused_decoder.forward import Mix, embedding, finished_logits
from outrider.engine.gpu.accelerator import overlapping
from outrider.engine.gpu.kernels.one_row import one_row_kernel
from outrider.engine.gpu.layout import DeviceStep
from outrider.engine.gpu.operations import GpuOperations, RotatedStep
from outrider.engine.gpu.shapes import check_shape

BLOCK_NUMBERS = 512
"""Numbers of a row that a program multiplies at a time."""
STAGES = 3
"""Blocks of a weight that a program loads at once."""
NARROW, WIDE = 4, 8
"""Columns that a program computes: NARROW where the weight has fewer columns than numbers of a row, so that
there are enough programs."""


class OneRowProduct:
    """A linear layer for one row: norm, product and gate, or product and residual add."""

    def __init__(self, layer: nn.Module, norm: Norm | None = None, gate: str = "") -> None:
        """`gate` is the activation of a gated MLP, whose weight is gate and up; or empty."""
        linear: Any = layer
        self._weight, self._norm, self._gate = linear.weight.detach(), norm, gate
        self._bias = None if linear.bias is None else linear.bias.detach()
        columns, self._numbers = self._weight.shape
        check_shape("weight", self._weight, columns, self._numbers)
        self._columns = columns // 2 if gate else columns
        self._block = WIDE if self._columns >= self._numbers else NARROW
        self._options = overlapping(self._weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[1, in] -> [1, out]."""
        out = x.new_empty((1, self._columns))
        self._launch(x, out, add=False)
        return out

    def add(self, x: Tensor, hidden: Tensor) -> None:
        """Add the result for x [1, in] to hidden [1, out]."""
        self._launch(x, hidden, add=True)

    def _launch(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        norm = self._norm
        check_shape("what a product takes", x, 1, self._numbers)
        check_shape("the result of a product", out, 1, self._columns)
        one_row_kernel[(-(-self._columns // self._block),)](
            x,
            x if norm is None else norm.weight,
            self._weight,
            x if self._bias is None else self._bias,
            out,
            0.0 if norm is None else norm.eps,
            IN=self._numbers,
            OUT=self._columns,
            BLOCK_IN=next_power_of_2(self._numbers),
            NORM=norm is not None,
            GATE=self._gate,
            BIAS=self._bias is not None,
            ADD=add,
            BLOCK_N=self._block,
            BLOCK_K=BLOCK_NUMBERS,
            STAGES=STAGES,
            **self._options,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's launches."""

    qkv: OneRowProduct
    heads: tuple[int, int]
    """Q + 2 H, and D."""
    mix: Mix[RotatedStep]
    output: OneRowProduct
    gate_up: OneRowProduct
    down: OneRowProduct


class OneRowForward:
    """Runs a decoder with the linear layers that it has at construction; see `FusedForward`."""

    def __init__(self, decoder: FusedDecoder, operations: GpuOperations) -> None:
        """`decoder` is one for which `takes` is true."""
        self._begin, self._embed = operations.begin, embedding(decoder)
        self._layers = [_launches(layer, operations) for layer in decoder.stack]
        self._logits = finished_logits(decoder, operations, OneRowProduct(decoder.head, decoder.norm))

    def __call__(self, step: DeviceStep) -> Tensor:
        """Logits [1, V] of a step of one token."""
        shared, hidden = self._begin(step), self._embed(step)
        for layer in self._layers:
            mixed = layer.mix(layer.qkv(hidden).view(1, *layer.heads), shared)
            layer.output.add(mixed, hidden)
            layer.down.add(layer.gate_up(hidden), hidden)
        return self._logits(hidden)


def takes(decoder: FusedDecoder) -> bool:
    """True if all layers of a decoder are as Llama's: norms before attention and MLP, a gated MLP, and 16-bit
    weights (or float32, in tests)."""
    return (
        decoder.inputs is None
        and _scales(decoder.norm)
        and _is_plain(decoder.head)
        and all(_takes_layer(layer) for layer in decoder.stack)
    )


def _takes_layer(layer: FusedLayer) -> bool:
    mlp = layer.mlp
    return (
        _takes_settings(layer.settings)
        and layer.inputs is None
        and isinstance(mlp, GatedMlp)
        and mlp.gate.activation in NAMES
        and all(_is_plain(part) for part in (layer.qkv, layer.output, mlp.gate.gate_up, mlp.down))
    )


def _takes_settings(settings: LayerSettings) -> bool:
    return (
        _scales(settings.input_norm)
        and _scales(settings.mlp_norm)
        and settings.output_norm is None
        and settings.down_norm is None
        and settings.added_factor == settings.factor == 1.0
        and not settings.parallel
        and not settings.latent
    )


def _scales(norm: Norm | None) -> bool:
    """True for an RMS norm."""
    return norm is not None and not norm.centred and norm.bias is None


def _is_plain(layer: nn.Module) -> bool:
    """True for a linear layer of torch without codes, whose weight has no gaps."""
    return type(layer) is nn.Linear and layer.weight.is_contiguous()


def _launches(layer: FusedLayer, operations: GpuOperations) -> _Layer:
    settings, mlp = layer.settings, layer.mlp
    assert isinstance(mlp, GatedMlp), "`takes` is true"
    return _Layer(
        OneRowProduct(layer.qkv, settings.input_norm),
        (settings.query_heads + settings.stored, settings.head_dim),
        operations.mix(layer),
        OneRowProduct(layer.output),
        OneRowProduct(mlp.gate.gate_up, settings.mlp_norm, NAMES[mlp.gate.activation]),
        OneRowProduct(mlp.down),
    )
