"""A model that was loaded and checked to run on this engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from outrider.engine.cpu.backend import Backend, codes_backend, kernels_name
from outrider.engine.cpu.choice import BackendChoice
from outrider.engine.cpu.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's keys and values, the same in every layer unless there are `parts`."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    parts: tuple[Geometry, ...] = ()
    """Where layers differ, have no attention, or see another layer's keys and values: what is kept, one part
    for each shape. The heads above are then those of the first layer with attention."""
    places: tuple[tuple[int, int] | None, ...] = ()
    """With parts, for each layer: the part that holds its keys and values, and the layer's number in that
    part; None for a layer without attention."""
    latent: bool = False
    """Whether values are the last columns of keys, and stored as these (DeepSeek)."""

    @property
    def values_at(self) -> int:
        """The place in a token's entry, its keys and values in a layer, at which the values begin."""
        return self.kv_heads * self.head_dim - (self.value_dim if self.latent else 0)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one kv head, the fewest of any layer."""
        own = self.query_heads // self.kv_heads
        return min((part.queries_per_kv for part in self.parts), default=own)

    @property
    def numbers_per_token(self) -> int:
        """Numbers of the keys and values of one token in all layers."""
        if self.parts:
            return sum(part.numbers_per_token for part in self.parts)
        return self.num_layers * (self.values_at + self.kv_heads * self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder-only model in evaluation mode, and what callers need to know about it."""

    model: nn.Module
    """A `FusedDecoder`, or the transformers model."""
    name: str
    """The last part of the folder or hub id."""
    vocabulary_size: int
    """Columns of the logits, padding included."""
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    device: torch.device
    geometry: Geometry
    kernels: bool = False
    """True where GPU kernels compute what lies between the products."""
    ordered: bool = False
    """True where these kernels and those of the products compute the same bits for a token in every batch."""
    fp8_kv: bool = False
    """True where keys and values are kept in 8 bits (e4m3), by GPU kernels."""
    choice: BackendChoice | None = None
    """The back end of the products, on the CPU."""
    workers: WorkerPool | None = None
    """The threads that compute them, on the CPU."""
    weights: str = ""
    """How the weights are quantized, such as int8; empty if they are not."""
    hidden_size: int = 0
    """Width of a layer's input."""
    num_layers: int = 0
    """Number of layers, whether or not they have attention."""
    ranks: int = 1
    """Processes that share each layer; `geometry` describes the heads of this one."""
    fingerprint: str = ""
    """Hash of the configuration and the weights as they were read; equal for equal models."""

    @property
    def kind(self) -> str:
        """The class of the model in transformers."""
        return str(getattr(self.model, "kind", type(self.model).__name__))

    @property
    def arithmetic(self) -> str:
        """What a token's bits depend on in addition to the model, for comparison with other replicas."""
        forward = "fused" if hasattr(self.model, "stack") else "modules"
        if self.device.type != "cpu":
            way = "" if self.kernels else " torch"
            kernels = torch.cuda.get_device_name(self.device) + (" ordered" if self.ordered else way)
        elif self.choice is None or self.choice.backend is Backend.ONEDNN:
            codes = f" {codes_backend(Backend.ONEDNN, self.dtype)} codes" if self.weights else ""
            kernels = f"onednn {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}{codes}"
        else:
            kernels = kernels_name(self.choice.backend, self.dtype)
        shared = f" in {self.ranks} ranks" if self.ranks > 1 else ""
        kept = " fp8 kv" if self.fp8_kv else ""
        return f"{self.weights} {self.dtype_name} {forward} {kernels}{kept}{shared}".lstrip()

    @property
    def dtype_name(self) -> str:
        """The dtype as settings spell it, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """The dtype of keys and values as settings spell it; may be fp8."""
        return "fp8" if self.fp8_kv else self.dtype_name

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV memory that one token takes."""
        return self.geometry.numbers_per_token * (1 if self.fp8_kv else self.dtype.itemsize)
