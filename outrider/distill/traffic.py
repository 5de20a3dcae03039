"""The training data of a draft: continuations of the target, and the windows that they are cut into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from outrider.collected import PATTERN, Collected
from outrider.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of one continuation that one forward computes."""

    tokens: tuple[int, ...]
    first: int
    """Index, at least 1, of the first token that counts; the tokens before it are context."""
    task: str

    @property
    def counted(self) -> int:
        """Number of tokens that count."""
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class Found:
    """The continuations in files, and the numbers of lines that could not be used."""

    kept: list[Collected]
    others: int
    """Number of continuations of another vocabulary or task, or with tokens that the draft does not have."""
    broken: int
    """Number of lines that are no continuations."""


def read_collected(path: str, vocabulary: str, size: int, task: str = "") -> Found:
    """The continuations in a file, or in the collected files of a folder, oldest first, without duplicates.

    Their tokens are below `size`, the number of tokens that target and draft have.

    Raises:
        ConfigError: there is no such file, or nothing in it can be used.
    """
    kept: dict[Collected, None] = {}
    others = broken = 0
    for line in _lines(path):
        one = Collected.parse(line)
        if one is None:
            broken += 1
        elif one.vocabulary != vocabulary or (task and one.task != task) or max(one.tokens) >= size:
            others += 1
        else:
            kept[one] = None
    if not kept:
        raise ConfigError(
            f"--collected: nothing in {path!r} can be used: {others} continuations are of another vocabulary "
            f"or task, {broken} lines are broken"
        )
    return Found(list(kept), others, broken)


def _lines(path: str) -> Iterator[str]:
    place = Path(path)
    files = sorted(place.glob(PATTERN)) if place.is_dir() else [place]
    try:
        for file in files:
            with file.open(encoding="utf-8", errors="replace") as lines:
                yield from lines
    except OSError as error:
        raise ConfigError(f"--collected: cannot read {path!r} ({error.strerror})") from error


def split(found: Sequence[Collected], held_out: float) -> tuple[list[Collected], list[Collected]]:
    """Split continuations into those to train on and about a share `held_out` to measure on; all
    continuations of one prompt are on one side.

    Raises:
        ConfigError: one of the two would be empty.
    """
    check_split((one.tokens[: one.prompt] for one in found), held_out)
    sides: tuple[list[Collected], list[Collected]] = ([], [])
    for one in found:
        sides[_is_held_out(one.tokens[: one.prompt], held_out)].append(one)
    return sides


def check_split(prompts: Iterable[Sequence[int]], held_out: float) -> None:
    """Check that `split` can divide the continuations of prompts.

    Raises:
        ConfigError: one of the two sides would be empty.
    """
    sides = [_is_held_out(prompt, held_out) for prompt in prompts]
    if len(set(sides)) < 2:
        raise ConfigError(
            f"--held-out: the texts after {len(sides)} prompts cannot be divided; give more, or another share"
        )


def _is_held_out(prompt: Sequence[int], share: float) -> bool:
    text = ",".join(map(str, prompt)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64 < share


def windows_of(found: Iterable[Collected], longest: int) -> list[Window]:
    """Windows of at most `longest` tokens. Every generated token counts in exactly one, and has at least half
    a window of context before it where the text has as much."""
    return [window for one in found for window in _windows(one, longest)]


def _windows(one: Collected, longest: int) -> Iterator[Window]:
    counted = one.prompt
    while counted < len(one.tokens):
        start = max(0, counted - longest // 2)
        end = min(start + longest, len(one.tokens))
        yield Window(one.tokens[start:end], counted - start, one.task)
        counted = end


def up_to(windows: Iterable[Window], tokens: int) -> list[Window]:
    """The first windows, until `tokens` tokens count."""
    chosen: list[Window] = []
    for window in windows:
        if tokens <= 0:
            break
        chosen.append(window)
        tokens -= window.counted
    return chosen
