"""Where a model is: in a folder or on the Hugging Face hub. Light, so that a wrong name is found before torch
is imported and before the hub is asked."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from outrider.protocol.errors import ModelError

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""`name` or `owner/name`."""
POINTER = b"version https://git-lfs"
"""How Git LFS begins the small file that it leaves in place of one that was not fetched."""
WANTED = "give a folder with config.json and weights, or a hub id"


def check_model_path(model: str) -> None:
    """Refuse what is neither a folder nor a hub id.

    Where a folder `owner` exists, `owner/name` is a path: a mistyped folder is far more frequent than a hub
    id that begins like a folder.

    Raises:
        ModelError: `model` is not set, no text, a path to a folder that does not exist, or to one whose files
            were not fetched.
    """
    if not model:
        raise ModelError(f"model: not set; {WANTED}")
    if not _is_utf8(model):
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


def _check_fetched(folder: Path) -> None:
    for path in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))):
        with suppress(OSError), path.open("rb") as file:  # who loads it says why it cannot be read
            if file.read(len(POINTER)) == POINTER:
                raise ModelError(
                    f"model: {path.name} in {str(folder)!r} only points to the file that Git LFS keeps; run "
                    "`git lfs pull` there"
                )


def _is_utf8(name: str) -> bool:
    """Whether a name can be sent. Python keeps bytes that are none in the locale's encoding as they are."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_file(model: str, name: str) -> Path | None:
    """A file of a model folder or hub id, which is fetched first; None when it has no such file.

    Raises:
        ModelError: the hub does not give it.
    """
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file  # slow to import, and needed for hub ids alone

    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise cannot_load(model, f"has no {name} that can be fetched ({reason})") from error
    return None if found is None else Path(found)


def cannot_load(model: str, problem: str) -> ModelError:
    """The error for a model that is not what its name promised; a name that is no folder was asked for on the
    hub."""
    if Path(model).is_dir():
        return ModelError(f"model: {model!r} {problem}; {WANTED}")
    return ModelError(f"model: there is no folder {model!r}, and as a hub id it {problem}; {WANTED}")
