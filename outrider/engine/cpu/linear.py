"""Linear layers on the CPU, whose weights are packed once, and the function that puts them into a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu.backend import (
    Backend,
    matmul_type,
    quantized_type,
    unsupported_reason,
    vector_backend,
)
from outrider.engine.cpu.matmul import PanelProduct
from outrider.engine.cpu.panels import STEP_BYTES
from outrider.engine.cpu.worker_pool import MIN_SHARE, WorkerPool
from outrider.engine.linears import HeadLinears, linear_weight, linears_of
from outrider.engine.quantization.modules import codes_of, held_bytes
from outrider.engine.quantization.stacked import DOWN, WEIGHTS, codes_of_experts, is_stacked, weights_of
from outrider.engine.threads import torch_threads

KEPT_BYTES = 16 * 2**20
"""Bytes of a model's weights that may still stay in the cores' shared cache: half the size of a common
one."""


class CpuLinear(nn.Module):
    """`x @ weight.T + bias`, [..., in] -> [..., out]."""

    ordered = False
    """True where a row's bits do not depend on the others."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    nbytes: int
    """Bytes of the weight."""


class LibraryLinear(CpuLinear):
    """A linear layer by oneDNN, in the block layout that its kernels read.

    That halves the time of small batches; these are the operators that torch's own compiler uses. A row's
    result seldom depends on how many others there are, while plain float32 products change their order of
    additions at four rows: so even weights too small to gain speed are packed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, workers: WorkerPool | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.nbytes = weight.dtype, weight.nbytes
        self._workers = workers or WorkerPool()
        # torch's own threads share a product by themselves; members of the pool get a part each.
        shared = torch.get_num_threads() == 1 and weight.nbytes >= self._workers.largest * MIN_SHARE
        self._parts = list(_split(weight.detach(), bias, self._workers.largest if shared else 1))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if len(self._parts) == 1:
            return self._matmul(self._parts[0], x)
        result = x.new_empty(*x.shape[:-1], self.out_features)

        @torch.inference_mode()
        def work(_member: int, part: tuple[slice, Tensor, Tensor | None]) -> None:
            result[..., part[0]] = self._matmul(part, x)

        self._workers.share(self._workers.size(x.numel() // self.in_features), self._parts, work)
        return result

    @staticmethod
    def _matmul(part: tuple[slice, Tensor, Tensor | None], x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, part[1], part[2], "none", [], "")
        return y


class KernelLinear(CpuLinear):
    """A linear layer by a kernel of the project, which reads a weight once for many rows."""

    ordered = True

    def __init__(self, matmul: PanelProduct, dtype: torch.dtype, nbytes: int) -> None:
        """`nbytes` is the weight's size. A layer that opens a gate returns SiLU(gate) up, [..., out / 2]."""
        super().__init__()
        self.out_features, self.in_features = matmul.columns, matmul.numbers
        self.dtype, self.nbytes, self.gated = dtype, nbytes, matmul.gated
        self.matmul = matmul

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.ndim == 2 and x.is_contiguous():
            return self.matmul(x)
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.matmul(rows).view(*x.shape[:-1], self.matmul.columns)


def pack_linears(
    model: nn.Module, backend: Backend, workers: WorkerPool | None = None, gates: Collection[str] = ()
) -> int:
    """Replace the linear layers of a model on the CPU by packed ones where possible; return how many.

    The worker pool shares the work. With kernels of the project the layers named in `gates` return SiLU(gate)
    up, and experts are replaced too. An embedding that shares its weight with the output layer keeps it: the
    output layer gets a packed copy. Layers with codes (quantized weights) run on the kernels for codes,
    whatever the back end. torch arranges weights for the project's kernels with as many threads as the pool
    has.
    """
    workers = workers or WorkerPool()
    ways = {name: _way_of(layer, backend) for name, layer in linears_of(model).items()}
    ours = {name: way for name, way in ways.items() if way not in (None, _library_linear)}
    mixtures = [name for name, module in model.named_modules() if packs_experts(module, backend)]
    passing = bool(mixtures) or sum(_held(model.get_submodule(name)) for name in ours) > KEPT_BYTES
    heads = [name for name, module in model.named_modules() if _packs_heads(module, backend)]
    for name in [name for name, way in ways.items() if way is _library_linear]:
        _replace(model, name, partial(_library_linear, workers=workers))
    with torch_threads(workers.threads):
        for name, way in ours.items():
            options = {"gated": name in gates, "passing": passing}
            _replace(model, name, partial(way, backend=backend, workers=workers, **options))
        for name in heads:
            _replace(model, name, partial(_packed_heads, backend=backend, workers=workers))
        for name in mixtures:
            _replace(model, name, partial(_packed_experts, backend=backend, workers=workers))
    return sum(way is not None for way in ways.values())


def runs_codes(module: nn.Module) -> bool:
    """True for a linear layer whose codes this processor has kernels for."""
    codes, weight = codes_of(module), module.weight
    assert isinstance(weight, Tensor)
    return codes is not None and weight.device.type == "cpu" and vector_backend(weight.dtype) is not None


def _way_of(layer: nn.Module, backend: Backend) -> Callable[..., CpuLinear] | None:
    """Return the function that packs a linear layer; None if the layer stays as it is."""
    if runs_codes(layer):
        return _coded_linear
    if _fits(linear_weight(layer), backend):
        return _kernel_linear
    return _library_linear if _library_packs(linear_weight(layer)) else None


def _held(layer: nn.Module) -> int:
    """Bytes of weights that the layer's product reads."""
    codes = codes_of(layer)
    return linear_weight(layer).nbytes if codes is None else held_bytes(codes)


def _kernel_linear(module: Any, *, backend: Backend, **options: Any) -> KernelLinear:
    weight = linear_weight(module).detach()
    bias = None if module.bias is None else module.bias.detach()
    return KernelLinear(_matmul_type(backend)(weight, bias, **options), weight.dtype, weight.nbytes)


def _coded_linear(module: Any, *, backend: Backend, **options: Any) -> KernelLinear:
    codes, dtype = codes_of(module), linear_weight(module).dtype
    assert codes is not None
    bias = None if module.bias is None else module.bias.detach()
    matmul = quantized_type(backend, dtype)(codes, bias, dtype=dtype, **options)
    return KernelLinear(matmul, torch.int8, held_bytes(codes))


def _matmul_type(backend: Backend) -> Callable[..., PanelProduct]:
    kind = matmul_type(backend)
    assert kind is not None, "only layers that a back end of the project takes get here"
    return kind


def expert_weights(module: nn.Module) -> list[Tensor]:
    """The weights [out, in] of each expert's layers; none if the experts have codes."""
    if not is_stacked(module) or codes_of_experts(module, DOWN):
        return []
    return [weight for name in WEIGHTS for weight in weights_of(module, name)]


def packs_experts(module: nn.Module, backend: Backend) -> bool:
    """True for experts that the project's kernels can compute."""
    if not is_stacked(module) or weights_of(module, DOWN).device.type != "cpu":
        return False
    if codes_of_experts(module, DOWN):
        return vector_backend(weights_of(module, DOWN).dtype) is not None
    return all(_fits(weights_of(module, name)[0], backend) for name in WEIGHTS)


def _packs_heads(module: nn.Module, backend: Backend) -> bool:
    return isinstance(module, HeadLinears) and _fits(module.weight[0], backend)


def _packed_heads(module: Any, *, backend: Backend, workers: WorkerPool) -> nn.Module:
    from outrider.engine.cpu.heads import PackedHeads

    return PackedHeads(module, partial(_matmul_type(backend), workers=workers, passing=True), workers)


def _packed_experts(module: nn.Module, *, backend: Backend, workers: WorkerPool) -> nn.Module:
    from outrider.engine.cpu.experts import PackedExperts

    dtype = weights_of(module, DOWN).dtype
    kind: Callable[..., PanelProduct]
    if codes_of_experts(module, DOWN):
        kind = partial(quantized_type(backend, dtype), dtype=dtype)
    else:
        kind = _matmul_type(backend)
    return PackedExperts(module, partial(kind, workers=workers, passing=True), workers)


def _library_linear(module: Any, *, workers: WorkerPool) -> LibraryLinear:
    return LibraryLinear(linear_weight(module), module.bias, workers)


def row_edges(model: nn.Module) -> Sequence[int]:
    """Numbers of rows beyond which the products of most weights take another pass, and so more time."""
    layers = [module for module in model.modules() if isinstance(module, KernelLinear)]
    if not layers:
        return ()
    kind = max(layers, key=lambda layer: layer.nbytes).matmul
    return range(kind.pass_rows, kind.max_rows + 1, kind.pass_rows)


def only_kernels(model: nn.Module) -> bool:
    """True when kernels of the project, which take any number of rows, compute all products: each matrix that
    they do not hold is an embedding."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    linears = [module for module in modules if isinstance(module, CpuLinear)]
    others = [weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim > 1]
    return bool(linears) and not others and all(linear.ordered for linear in linears)


def operators_exist(dtype: torch.dtype) -> bool:
    """True when the library has products with packed weights of a dtype on this processor."""
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_reorder_linear_weight")):  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and hasattr(mkldnn, "_linear_pointwise")


def _split(weight: Tensor, bias: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield parts of a layer's columns: their range, their packed weights and their bias."""
    for start, stop in pairwise(len(weight) * part // count for part in range(count + 1)):
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight[start:stop].contiguous())
        yield slice(start, stop), packed, None if bias is None else bias.detach()[start:stop]


def _replace(model: nn.Module, name: str, made: Callable[[nn.Module], nn.Module]) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, made(model.get_submodule(name)))


def _fits(weight: Tensor, backend: Backend) -> bool:
    """True when the back end is one of the project's and takes a weight [out, in]."""
    ours = backend is not Backend.ONEDNN and unsupported_reason(backend, weight.dtype) is None
    return ours and weight.device.type == "cpu" and weight.shape[1] * weight.itemsize % STEP_BYTES == 0


def _library_packs(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and operators_exist(weight.dtype)
