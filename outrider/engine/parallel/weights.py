"""Makes one rank's part of a model: a transformers model with narrower modules, filled with slices.

Only these slices of a checkpoint are read: safetensors says where in the file they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.engine.fused_decoder.shares import Share, share_of
from outrider.engine.loading.check_forward import TOLERANCE
from outrider.engine.loading.model_config import other_shape
from outrider.engine.loading.open_weights import Weight, first_row
from outrider.engine.parallel.cuts import Cut, Cuts
from outrider.protocol.errors import ModelError


def dtype_of_floats(weights: Mapping[str, Weight]) -> torch.dtype:
    """Return the dtype of the first weight that is no integer, as transformers does where a configuration
    names none."""
    found = (first_row(weight).dtype for weight in weights.values())
    return next((dtype for dtype in found if dtype.is_floating_point), torch.float32)


def part_of(weight: Weight, cut: Cut | None) -> Tensor:
    """Return the part of a weight that a cut selects, and read nothing else."""
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


def parts_of(weights: Mapping[str, Weight], cuts: Cuts) -> dict[str, Tensor]:
    """Return a rank's parts of weights that are not quantized."""
    return {
        name: part_of(weight, cuts.cut(name, weight.get_shape())) for name, weight in sorted(weights.items())
    }


def check_shapes(
    model: str, weights: Mapping[str, Weight], network: PreTrainedModel, shares: Mapping[str, Share]
) -> None:
    """Compare the shapes of weights that are not quantized with those of the whole model: a part of a wrong
    one may have the right shape.

    Names may begin differently in the checkpoint, so weights whose names end alike are not told apart.

    Raises:
        ModelError: one has another shape.
    """
    known: dict[str, list[torch.Size]] = {}
    for name, weight in network.named_parameters():
        known.setdefault(_ending(name), []).append(weight.shape)
    for name, stored in sorted(weights.items()):
        share = share_of(shares, name) or share_of(shares, name.rpartition(".")[0])
        if share is None:
            continue
        # Experts that are apart in the checkpoint are stacked in the network.
        shape, shapes = stored.get_shape(), [*known.get(_ending(name), []), torch.Size(share.shape)]
        if torch.Size(shape) not in shapes:
            raise other_shape(model, name, shape, shapes[0])


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def network_of(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    parts: Mapping[str, Tensor],
    cuts: Cuts,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Return a model with a rank's parts of the weights, on the CPU.

    Raises:
        ModelError: weights are missing, or their parts do not fit this model.
    """
    loading: Any = _narrowed(kind, cuts).from_pretrained
    network, info = loading(
        None,
        config=config,
        state_dict=dict(parts),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below
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


def skeleton_part(kind: type[PreTrainedModel], config: PretrainedConfig, cuts: Cuts) -> PreTrainedModel:
    """Return a model with a rank's modules, without weights."""
    with torch.device("meta"):
        return _narrowed(kind, cuts)(config)


def _narrowed(kind: type[PreTrainedModel], cuts: Cuts) -> type[PreTrainedModel]:
    """Return a class of models whose modules have a rank's sizes: no configuration can describe all of
    them."""

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
                module.padding_idx = None  # may be another rank's; it only matters in training
            module.num_embeddings = len(module.weight)
