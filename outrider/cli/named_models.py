"""Checks models that flags name, so that a wrong name is refused before anything is loaded or started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.engine.loading.model_path import CONFIG, WANTED, cannot_load, check_model_path
from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import ConfigError, ModelError, first_line
from outrider.protocol.vocabulary import vocabulary_mismatch

SETTING = re.compile(r"^(model|skip_layers): ")
"""Matches the setting of a service that an error names."""
HUB_SECONDS = 10.0
"""Longest wait for the hub, in seconds."""


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """A context manager in which errors about a model name the flag.

    Raises:
        ConfigError: in place of a `ModelError`.
    """
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{flag}: {SETTING.sub('', str(error))}") from error


def check_model(flag: str, model: str) -> None:
    """Refuse a name that is plainly no model.

    Raises:
        ConfigError: it is no model; names the flag.
    """
    with naming(flag):
        check_model_path(model)
        if not Path(model).is_dir():
            check_hub(model)
        elif (Path(model) / CONFIG).is_file():
            json_file(model, CONFIG)  # fails if it is no JSON
        else:
            raise ModelError(f"{model!r} has no {CONFIG}; {WANTED}")


def check_hub(model: str) -> None:
    """Ask the hub once for a model that was not downloaded; the processes that load it retry for minutes.

    Raises:
        ModelError: the hub cannot be reached, or does not provide the model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, CONFIG), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=HUB_SECONDS)
    except Exception as error:  # its HTTP library changes from version to version
        raise cannot_load(model, f"cannot be downloaded ({first_line(error)})") from error


def check_vocabulary(target: str, draft: str, sizes: tuple[int, int] = (0, 0)) -> None:
    """Refuse a draft whose tokens are not the target's; without tokenizers, compare the vocabularies'
    `sizes`.

    Raises:
        ConfigError: the tokens differ; names the draft.
    """
    from outrider.engine.loading.tokenizer_files import load_tokenizer, vocabulary_hash

    files = [load_tokenizer(model) for model in (target, draft)]
    hashes = [
        vocabulary_hash(file.tokenizer_json if file else None, size)
        for file, size in zip(files, sizes, strict=True)
    ]
    if other := vocabulary_mismatch((target, hashes[0]), (draft, hashes[1])):
        raise ConfigError(f"--draft: {other}")
