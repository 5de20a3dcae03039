"""Makes one rank's part of a model: a transformers model with narrower modules, filled with slices.

Of a checkpoint only the slices are read: safetensors says where in the file they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from outrider.engine.loading.check_forward import TOLERANCE
from outrider.engine.loading.model_config import LOAD_ERRORS, unreadable
from outrider.engine.loading.model_path import cannot_load
from outrider.engine.parallel.cuts import Cut, Cuts
from outrider.protocol.errors import ModelError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Weight(Protocol):
    """A weight that can be read in part, as safetensors' slices are."""

    def get_shape(self) -> list[int]:
        """Its whole shape."""

    def __getitem__(self, place: Any) -> Tensor:
        """The rows and columns of some slices."""


class InMemory:
    """A tensor as a `Weight`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """See `Weight`."""
        return list(self._tensor.shape)

    def __getitem__(self, place: Any) -> Tensor:
        return self._tensor[place]


def part_of(weight: Weight, cut: Cut | None) -> Tensor:
    """What a cut leaves of a weight; reads nothing else of it."""
    if cut is None:
        return weight[...]
    around = (slice(None),) * cut.axis
    shape = weight.get_shape()
    spans = [(first, min(end, shape[cut.axis])) for first, end in cut.spans]
    parts = [weight[(*around, slice(first, end))] for first, end in spans if first < end]
    shape[cut.axis] = cut.size - sum(part.shape[cut.axis] for part in parts)
    if shape[cut.axis]:
        parts.append(weight[0:1].new_zeros(shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.axis)


def network_of(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    weights: Mapping[str, Weight],
    cuts: Cuts,
    dtype: torch.dtype | str,
) -> PreTrainedModel:
    """A model with a rank's part of the weights, on the CPU.

    Raises:
        ModelError: weights are missing, or their parts do not fit this model.
    """
    parts = {
        name: part_of(weight, cuts.cut(name, weight.get_shape())) for name, weight in sorted(weights.items())
    }
    loading: Any = _narrowed(kind, cuts).from_pretrained
    network, info = loading(
        None,
        config=config,
        state_dict=parts,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # said below
    )
    problems = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if problems:
        raise ModelError(
            f"tensor_parallel: {len(problems)} weights of {kind.__name__}, such as {problems[0]}, are "
            "missing or cannot be divided between ranks; set tensor_parallel to 1"
        )
    if network.dtype not in TOLERANCE:
        raise ModelError(f"dtype: weights of {network.dtype} cannot run here; set float32 or bfloat16")
    network.requires_grad_(False)
    evaluated: PreTrainedModel = network.eval()
    return evaluated


def _narrowed(kind: type[PreTrainedModel], cuts: Cuts) -> type[PreTrainedModel]:
    """A kind of model that is made with modules of a rank's size: no configuration says them all."""

    def made(network: Any, *arguments: Any, **settings: Any) -> None:
        kind.__init__(network, *arguments, **settings)
        for name, module in network.named_modules():
            _narrow(name, module, cuts)

    return type(kind.__name__, (kind,), {"__init__": made, "__module__": kind.__module__})


def _narrow(name: str, module: Any, cuts: Cuts) -> None:
    for key, weight in list(module.named_parameters(recurse=False)):
        if (cut := cuts.cut(f"{name}.{key}", weight.shape)) is not None:
            shape = list(weight.shape)
            shape[cut.axis] = cut.size
            setattr(module, key, nn.Parameter(weight.new_empty(shape), requires_grad=False))
    match module:
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case Conv1D():
            module.nx, module.nf = module.weight.shape
        case nn.Embedding():
            if module.num_embeddings != len(module.weight):
                module.padding_idx = None  # may be another rank's; it matters to training alone
            module.num_embeddings = len(module.weight)


class Checkpoint:
    """The open safetensors files of a model: a folder's, or the hub's, which are fetched first.

    Raises:
        ModelError: there are none, or they cannot be read.
    """

    def __init__(self, model: str) -> None:
        self._open = ExitStack()
        self.weights: dict[str, Weight] = {}
        try:
            for path in _files(model):
                file = self._open.enter_context(safe_open(path, "pt"))
                self.weights |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except LOAD_ERRORS as error:
            raise unreadable(model, error) from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.clear()
        self._open.close()


def _files(model: str) -> Iterator[Path]:
    missing_ok: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": True,
    }
    one = cached_file(model, ONE_FILE, **missing_ok)
    if one is not None:
        yield Path(one)
        return
    index = cached_file(model, INDEX, **missing_ok)
    if index is None:
        raise cannot_load(model, "has no weights in safetensors")
    paths, _ = get_checkpoint_shard_files(model, index)  # type: ignore[no-untyped-call]
    yield from map(Path, paths)
