"""The shared memory in which ranks show each other their parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.parallel.board import MAX_BYTES, Board
from outrider.protocol.errors import ConfigError


def board(path: Path, rank: int, size: int, seconds: float = 30.0, check: Callable[[], None] = lambda: None):
    """A rank's view of the memory in a folder."""
    return Board(str(path / "board"), rank, size, seconds=seconds, check=check)


def part_of(rank: int, step: int) -> Tensor:
    """What a rank shows: shapes and dtypes change from step to step."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int64)[step % 4]
    shape = (1 + step % 7, 1 + step % 5, 3)[: 1 + step % 3]
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_the_parts_of_all(tmp_path: Path, size: int) -> None:
    """In the order of the ranks, whichever is ahead."""

    def run(rank: int) -> list[Tensor]:
        own = board(tmp_path, rank, size)
        return [own.gather(part_of(rank, step)).clone() for step in range(200)]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    for step in range(200):
        wanted = torch.stack([part_of(rank, step) for rank in range(size)])
        for ranks in found:
            assert torch.equal(ranks[step], wanted)


def test_the_largest_part_and_an_empty_one_fit(tmp_path: Path) -> None:
    """Both are at the edge of a place."""
    own = board(tmp_path, 0, 1)
    largest = torch.arange(MAX_BYTES // 4, dtype=torch.int32)
    assert torch.equal(own.gather(largest)[0], largest)
    assert own.gather(torch.empty(0, 8)).shape == (1, 0, 8)


def test_a_rank_that_shows_nothing_is_an_error(tmp_path: Path) -> None:
    """It hangs."""
    with pytest.raises(RuntimeError, match=r"no part came in 0\.01 s"):
        board(tmp_path, 0, 2, seconds=0.01).gather(torch.ones(3))


def test_the_check_ends_a_wait(tmp_path: Path) -> None:
    """It knows that a process has ended long before the wait is over."""

    def gone() -> None:
        raise ProcessLookupError

    with pytest.raises(ProcessLookupError):
        board(tmp_path, 0, 2, check=gone).gather(torch.ones(3))


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check the first write would end the process without a word."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"tensor_parallel: .* has no room for 4 MiB \(No space .*TMPDIR"):
        board(tmp_path, 0, 2)
