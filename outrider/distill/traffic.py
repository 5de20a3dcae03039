"""What a draft learns from: continuations of the target, and the windows of them that are computed."""

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
    """Index of the first token that counts; those before are context. At least 1."""
    task: str

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class Found:
    """Continuations of files, and how many lines were of no use."""

    kept: list[Collected]
    others: int
    """Of another vocabulary, or not of the task that was asked for."""
    broken: int
    """No continuations."""


def read_collected(path: str, vocabulary: str, task: str = "") -> Found:
    """The continuations of a file or of the collected files of a folder, oldest first; equal ones once.

    Raises:
        ConfigError: there is no such file, or nothing in it can be used.
    """
    kept: dict[Collected, None] = {}
    others = broken = 0
    for line in _lines(path):
        one = Collected.parse(line)
        if one is None:
            broken += 1
        elif one.vocabulary != vocabulary or (task and one.task != task):
            others += 1
        else:
            kept[one] = None
    if not kept:
        raise ConfigError(
            f"--collected: nothing in {path!r} can be used: {others} continuations are of another vocabulary "
            f"or task, {broken} lines are none"
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
    """Continuations to train on, and about a share to measure on; all of one prompt are on one side.

    Raises:
        ConfigError: one of both is empty.
    """
    sides: tuple[list[Collected], list[Collected]] = ([], [])
    for one in found:
        prompt = ",".join(map(str, one.tokens[: one.prompt])).encode()
        place = int.from_bytes(blake2b(prompt, digest_size=8).digest(), "big") / 2**64
        sides[place < held_out].append(one)
    if not all(sides):
        raise ConfigError(
            f"--held-out: {len(found)} continuations cannot be divided; collect more, or change the share"
        )
    return sides


def windows_of(found: Iterable[Collected], longest: int) -> list[Window]:
    """Windows of at most so many tokens in which every generated token counts once, after half a window of
    context where there is as much."""
    return [window for one in found for window in _windows(one, longest)]


def _windows(one: Collected, longest: int) -> Iterator[Window]:
    counted = one.prompt
    while counted < len(one.tokens):
        start = max(0, counted - longest // 2)
        end = min(start + longest, len(one.tokens))
        yield Window(one.tokens[start:end], counted - start, one.task)
        counted = end


def up_to(windows: Iterable[Window], tokens: int) -> list[Window]:
    """The first windows, until so many tokens count."""
    chosen: list[Window] = []
    for window in windows:
        if tokens <= 0:
            break
        chosen.append(window)
        tokens -= window.counted
    return chosen
