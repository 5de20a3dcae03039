"""Files that flags name; an error names the flag."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider.protocol.errors import ConfigError, InvalidRequest


def read_file(flag: str, path: str) -> str:
    """The text of a file.

    Raises:
        InvalidRequest: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(flag, f"cannot read {path!r} ({error.strerror}); name another file") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(flag, f"{path!r} is no text in UTF-8; name another file") from error


def write_file(flag: str, path: str, text: str) -> None:
    """Write a file, or none: a part of one is removed.

    Raises:
        InvalidRequest: it cannot be written.
    """
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                if Path(path).is_file():  # and no device, such as /dev/stdout
                    Path(path).unlink()
                raise
    except OSError as error:
        raise InvalidRequest(flag, f"cannot write {path!r} ({error.strerror})") from error


def check_output(flag: str, path: str) -> None:
    """Check that a file can be written where it is to be, before the work begins.

    Raises:
        InvalidRequest: its folder is not there, or it is a folder itself.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InvalidRequest(flag, f"there is no folder {str(Path(path).parent)!r}; make it, or name another")
    if Path(path).is_dir():
        raise InvalidRequest(flag, f"{path!r} is a folder; name a file")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder.

    Raises:
        ConfigError: none can be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="outrider-")
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: no temporary folder can be made ({error.strerror}); name one that can be written to"
        ) from error
