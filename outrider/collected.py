"""Served tokens as they are kept to train drafts: one JSON object per line.

    {"vocabulary": "4f0c...", "task": "code", "prompt": 3, "tokens": [17, 5, 9, 211, 4]}

Token ids, how many of them are prompt, the caller's traffic label, and the vocabulary that the ids are of.
Nothing says whose request it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

PATTERN = "collected-*.jsonl"
"""Names of the files."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One continuation."""

    vocabulary: str
    """Hash of the vocabulary, as of `ModelInfo`."""
    task: str
    prompt: int
    """How many of the tokens are prompt."""
    tokens: tuple[int, ...]

    def line(self) -> str:
        """For a file, with its line end."""
        fields = {
            "vocabulary": self.vocabulary,
            "task": self.task,
            "prompt": self.prompt,
            "tokens": self.tokens,
        }
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def parse(cls, line: str) -> Collected | None:
        """The inverse; None for a line that was cut, as by a full disk, or that says something else."""
        try:
            fields = json.loads(line)
            vocabulary, task = str(fields["vocabulary"]), str(fields["task"])
            prompt, tokens = int(fields["prompt"]), tuple([int(token) for token in fields["tokens"]])
        except (ValueError, TypeError, KeyError):
            return None
        sound = 1 <= prompt < len(tokens) and min(tokens) >= 0
        return cls(vocabulary, task, prompt, tokens) if sound else None
