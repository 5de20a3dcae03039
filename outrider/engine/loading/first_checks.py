"""Finds settings of a replica that cannot be right before anything is loaded. Imports little."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from outrider.config import DraftConfig, EngineConfig
from outrider.engine.loading.model_path import CONFIG, check_model_path
from outrider.engine.loading.tokenizer_files import json_file
from outrider.layer_lists import parse_layers
from outrider.process import parse_cpus
from outrider.protocol.errors import ConfigError, ModelError

NO_TARGET = "target: not set; name the folder or hub id of the target that the EAGLE head was trained for"


def check_settings(config: EngineConfig) -> None:
    """Refuse cores that this machine does not have, a name that is plainly no model, and layers that the
    model does not have.

    Raises:
        ConfigError: names the setting.
    """
    parse_cpus("helper_cpus", config.helper_cpus)
    if isinstance(config, DraftConfig):
        _check_draft(config)
    else:
        check_model_path(config.model)


def check_skipped(model: str, layers: str) -> None:
    """Refuse a list of layers to leave out that a model in a folder does not have, or that leaves none. The
    layers of others are counted once they are loaded.

    Raises:
        ModelError: says which layers there are.
    """
    if not layers or not Path(model).is_dir():
        return
    config = json_file(model, CONFIG)
    text = config.get("text_config")
    count = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    if isinstance(count, int):
        check_layers(parse_layers(layers), count)


def check_layers(skipped: Collection[int], count: int) -> None:
    """Refuse layers to leave out of a model that has `count`.

    Raises:
        ModelError: there are no such layers, or none would be left.
    """
    if skipped and (max(skipped) >= count or len(skipped) == count):
        raise ModelError(
            f"skip_layers: the model has the layers 0 to {count - 1}, and one at least must stay"
        )


def _check_draft(config: DraftConfig) -> None:
    if config.kind == "lookup":
        return
    check_model_path(config.model)
    if config.kind == "eagle" and not config.target:
        raise ConfigError(NO_TARGET)
    if config.kind == "model":
        check_skipped(config.model, config.skip_layers)
