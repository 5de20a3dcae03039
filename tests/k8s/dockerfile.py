"""Reads a Dockerfile into its stages: enough of the format for ours."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]
    """Instruction and its arguments, continuation lines joined."""

    def arguments(self, instruction: str) -> list[str]:
        """The arguments of every such instruction."""
        return [text for name, text in self.steps if name == instruction]


def read(file: Path) -> dict[str, Stage]:
    """The stages by name."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    steps = [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    stages: dict[str, Stage] = {}
    current: list[tuple[str, str]] = []
    for instruction, text in steps:
        if instruction == "FROM":
            base, _, name = text.partition(" AS ")
            current = []
            stages[name] = Stage(name, base, ())
        else:
            current.append((instruction, text))
        if stages:
            stages[name] = Stage(name, stages[name].base, tuple(current))
    return stages


def inherited(stages: dict[str, Stage], name: str, instruction: str) -> list[str]:
    """The arguments of an instruction in a stage and in those that it is built on, oldest first."""
    stage = stages[name]
    before = inherited(stages, stage.base, instruction) if stage.base in stages else []
    return before + stage.arguments(instruction)


def last_list(stages: dict[str, Stage], name: str, instruction: str) -> list[str]:
    """The last ENTRYPOINT or CMD that is in force, which must be written as a JSON list."""
    values: list[str] = json.loads(inherited(stages, name, instruction)[-1])
    return values
