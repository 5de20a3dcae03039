"""A model without some of its layers: a draft for the whole model that needs no training.

What a skipped layer would add to its input is left out; embedding, last norm and output layer stay. A model
whose last layers are skipped exits early. (Zhang and others 2024, "Draft & Verify: Lossless Large Language
Model Acceleration via Self-Speculative Decoding".)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from outrider.engine.loading.first_checks import check_layers
from outrider.protocol.errors import ModelError


def layers_of(network: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers, in order.

    Raises:
        ModelError: they cannot be distinguished from other modules, or none can be left out.
    """
    config, kind = network.config.get_text_config(), type(network).__name__
    if getattr(config, "hidden_size_per_layer_input", 0):  # Gemma 3n and 4
        raise ModelError(f"skip_layers: each layer of {kind} has embeddings of its own; leave it out")
    _set_kinds(network, getattr(config, "layer_types", None))
    count = config.num_hidden_layers
    # Search from the outside in, and not in the part for images, which may have as many layers (InternVL).
    for module in network.get_decoder().modules():  # type: ignore[no-untyped-call]
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"skip_layers: the layers of {kind} are not in a list; leave it out")


def leave_out(network: PreTrainedModel, skipped: Collection[int]) -> None:
    """Remove layers from a model for good. The others are renumbered, in its configuration too.

    Raises:
        ModelError: there are no such layers, or none would be left.
    """
    layers = layers_of(network)
    check_layers(skipped, len(layers))
    _keep(network, layers, [index for index in range(len(layers)) if index not in skipped])


@contextmanager
def without(network: PreTrainedModel, layers: nn.ModuleList, skipped: Collection[int]) -> Iterator[None]:
    """Leave out some of the model's `layers` while the `with` block runs; for forwards without a cache."""
    whole, config = list(layers), network.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    _keep(network, layers, [index for index in range(len(whole)) if index not in skipped])
    try:
        yield
    finally:
        _set_layers(layers, whole)
        config.num_hidden_layers = len(whole)
        _set_kinds(network, kinds)


def _keep(network: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[int]) -> None:
    """Keep these of the model's `layers`. Masks and rotary positions follow the kind of each."""
    config = network.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    _set_kinds(network, kinds and [kinds[index] for index in kept])
    _set_layers(layers, [layers[index] for index in kept])
    config.num_hidden_layers = len(kept)


def _set_kinds(network: PreTrainedModel, kinds: Sequence[str] | None) -> None:
    if kinds is None:
        return
    try:
        network.config.get_text_config().layer_types = kinds
    except AttributeError as error:  # computed from other settings, as in Jamba
        raise ModelError(
            f"skip_layers: the kinds of layers of {type(network).__name__} cannot be set; leave it out"
        ) from error


def _set_layers(layers: nn.ModuleList, kept: list[nn.Module]) -> None:
    layers._modules = {}
    for index, layer in enumerate(kept):
        layers.append(layer)
        for module in layer.modules():
            for name in ("layer_idx", "layer_id"):  # layer_id in GPT-Neo
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, index)
