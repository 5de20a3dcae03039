"""The file format of served tokens that are kept to train drafts: one JSON object per line.

    {"vocabulary": "4f0c...", "task": "code", "prompt": 3, "tokens": [17, 5, 9, 211, 4]}

A line holds token ids, the number of them that are prompt, the caller's traffic label, and a hash of the
vocabulary. It does not identify the caller.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from outrider.protocol.errors import ConfigError

PATTERN = "collected-*.jsonl"
"""Pattern of the files' names."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One continuation."""

    vocabulary: str
    """Hash of the vocabulary, as in `ModelInfo`."""
    task: str
    prompt: int
    """Number of first tokens that are prompt."""
    tokens: tuple[int, ...]

    def line(self) -> str:
        """The continuation as a line of a file, with its line end."""
        fields = {
            "vocabulary": self.vocabulary,
            "task": self.task,
            "prompt": self.prompt,
            "tokens": self.tokens,
        }
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def parse(cls, line: str) -> Collected | None:
        """The inverse of `line`; None if the line was cut off, as by a full disk, or is something else."""
        try:
            fields = json.loads(line)
            vocabulary, task = str(fields["vocabulary"]), str(fields["task"])
            prompt, tokens = int(fields["prompt"]), tuple([int(token) for token in fields["tokens"]])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        sound = 1 <= prompt < len(tokens) and min(tokens) >= 0
        return cls(vocabulary, task, prompt, tokens) if sound else None


def make_folder(folder: str) -> Path:
    """The folder of the files, which is made unless it is there.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"collect: cannot make the folder {folder!r} ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"collect: cannot write to the folder {folder!r}; name another one")
    return path
