"""The weights of a checkpoint, read from its files in parts: safetensors says where in a file each weight
is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from outrider.engine.loading.model_config import LOAD_ERRORS, unreadable
from outrider.engine.loading.model_path import cannot_load, find_file
from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import ModelError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

LAYERS, MTP = r"^(?:model\.)?(?:language_model\.)?layers\.", r"^(?:model\.)?mtp\."
"""Patterns of how the weights of layers are named, and those of MTP layers that are kept apart."""
_LAYER, _MTP = re.compile(rf"{LAYERS}(\d+)\."), re.compile(MTP)


class Weight(Protocol):
    """A weight that can be read in part, as safetensors' slices are."""

    def get_shape(self) -> list[int]:
        """Its whole shape."""

    def __getitem__(self, place: Any) -> Tensor:
        """Return the rows and columns that slices select."""


class InMemory:
    """A tensor in memory as a `Weight`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """See `Weight`."""
        return list(self._tensor.shape)

    def __getitem__(self, place: Any) -> Tensor:
        return self._tensor[place]


class InFile:
    """A tensor of an open file as a `Weight`; the whole tensor stays mapped."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name, self._slice = file, name, file.get_slice(name)

    def get_shape(self) -> list[int]:
        """See `Weight`."""
        shape: list[int] = self._slice.get_shape()
        return shape

    def __getitem__(self, place: Any) -> Tensor:
        found: Tensor = self._file.get_tensor(self._name) if place is ... else self._slice[place]
        return found


class OpenWeights:
    """The open safetensors files of a model folder, or of a hub id, from which they are fetched first.

    Raises:
        ModelError: there are no such files, or they cannot be read.
    """

    def __init__(self, model: str) -> None:
        self._open = ExitStack()
        self.weights: dict[str, Weight] = {}
        try:
            for path in weight_files(model):
                file: Any = self._open.enter_context(safe_open(path, "pt"))
                self.weights |= {name: InFile(file, name) for name in file.keys()}  # noqa: SIM118  # no dict
        except LOAD_ERRORS as error:
            raise unreadable(model, error) from error

    def __enter__(self) -> OpenWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.clear()
        self._open.close()


def first_row(weight: Weight) -> Tensor:
    """Return the first row of a weight, or all of one that is a single number."""
    return weight[0:1] if weight.get_shape() else weight[...]


def without_mtp(weights: Mapping[str, Weight], layers: int) -> dict[str, Weight]:
    """Return a target's weights without those of MTP layers, which come after its `layers` or apart."""
    return {
        name: weight
        for name, weight in weights.items()
        if not _MTP.match(name) and not ((layer := _LAYER.match(name)) and int(layer[1]) >= layers)
    }


def by_module(weights: Mapping[str, Weight]) -> dict[str, dict[str, Weight]]:
    """Return weights by the names of their modules, sorted, and then by the last part of their own names."""
    modules: dict[str, dict[str, Weight]] = {}
    for name, weight in sorted(weights.items()):
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = weight
    return modules


def check_index(model: str) -> None:
    """Check the file that says which weight is in which file, if there is one.

    Raises:
        ModelError: it does not say that, or names a file that is not in the model's folder.
    """
    if find_file(model, ONE_FILE) is not None or find_file(model, INDEX) is None:
        return
    names = json_file(model, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(map(_is_file, names.values())):
        raise ModelError(
            f"model: {INDEX} of {model!r} must have an object `weight_map` with a safetensors file for each "
            "weight; fetch it again"
        )
    missing = sorted(name for name in set(names.values()) if not (Path(model) / name).is_file())
    if missing and Path(model).is_dir():
        raise ModelError(f"model: {missing[0]} of {model!r} is missing, which {INDEX} names; fetch it")


def _is_file(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors")


def weight_files(model: str) -> list[Path]:
    """The files that hold the weights: a folder may have the same weights a second time in another layout.

    Raises:
        ModelError: there are none, or the file that names them is wrong.
    """
    one = find_file(model, ONE_FILE)
    if one is None and find_file(model, INDEX) is not None:
        check_index(model)
        names = sorted(set(json_file(model, INDEX)["weight_map"].values()))
        return [path for name in names if (path := find_file(model, name)) is not None]
    found = sorted(Path(model).glob("*.safetensors")) if one is None else [one]
    if not found:
        raise cannot_load(model, "has no weights in safetensors; convert others where you trust them")
    return found
