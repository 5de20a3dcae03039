"""Where a model is: in a folder or on the Hugging Face hub. It imports little, so that a wrong name is found
before torch is imported and before the hub is asked."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from outrider.protocol.errors import ModelError, first_line

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""`name` or `owner/name`."""
POINTER = b"version https://git-lfs"
"""The beginning of the small file that Git LFS leaves in place of one that was not fetched."""
CONFIG, GENERATION = "config.json", "generation_config.json"
WANTED = "give a folder with config.json and weights, or a hub id"


def check_model_path(model: str) -> None:
    """Refuse what is neither a folder nor a hub id.

    Where a folder `owner` exists, `owner/name` is a path: a mistyped folder is far more frequent than a hub
    id that begins like a folder.

    Raises:
        ModelError: `model` is not set, is not UTF-8, or is a path to a folder that does not exist or whose
        files were not fetched.
    """
    if not model:
        raise ModelError(f"model: not set; {WANTED}")
    if not is_utf8(model):
        raise ModelError(f"model: the name {model!a} is not UTF-8; rename the folder, or set PYTHONUTF8=1")
    if Path(model).is_dir():
        _check_fetched(Path(model))
        return
    parent = Path(model).parent
    if not HUB_ID.fullmatch(model) or Path(model).exists():
        raise ModelError(f"model: there is no folder {model!r}; {WANTED}")
    if "/" in model and parent.is_dir():
        raise ModelError(
            f"model: there is no folder {model!r} in the folder {str(parent)!r}; to mean a hub id that "
            "begins like a folder, start from another working directory"
        )


def name_of(model: str) -> str:
    """Return the last part of a folder's path or of a hub id; a folder such as `.` has its real name."""
    return os.path.basename(os.path.abspath(model))


def _check_fetched(folder: Path) -> None:
    for path in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))):
        with suppress(OSError), path.open("rb") as file:  # loading it will say why it cannot be read
            if file.read(len(POINTER)) == POINTER:
                raise ModelError(
                    f"model: {path.name} in {str(folder)!r} only points to the file that Git LFS keeps; run "
                    "`git lfs pull` there"
                )


def is_utf8(text: str) -> bool:
    """True if a text can be encoded. Python keeps bytes that are invalid in the locale's encoding as
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_file(model: str, name: str) -> Path | None:
    """Return a file of a model folder, or of a hub id, from which it is fetched first; None if there is no
    such file.

    Raises:
        ModelError: the hub refuses it or cannot be reached.
    """
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file  # slow to import, and only needed for hub ids

    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise cannot_load(model, f"has no {name} that can be fetched ({first_line(error)})") from error
    return None if found is None else Path(found)


def cannot_load(model: str, problem: str) -> ModelError:
    """Return the error for a model that cannot be loaded. A name that is no folder was looked up on the
    hub."""
    if Path(model).is_dir():
        return ModelError(f"model: {model!r} {problem}; {WANTED}")
    return ModelError(f"model: there is no folder {model!r}, and as a hub id it {problem}; {WANTED}")
