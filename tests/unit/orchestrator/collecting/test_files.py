"""Collected files stay within their size, and a disk that takes nothing does no lasting harm."""

from __future__ import annotations

import os
import resource
from itertools import count
from pathlib import Path

import pytest

from orchestrator.collecting.files import FILES, RotatedFiles
from outrider.collected import PATTERN
from outrider.protocol.errors import ConfigError

LINE = "x" * 99 + "\n"


def rotated(folder: Path, max_bytes: int) -> RotatedFiles:
    """Files whose names tell their order."""
    return RotatedFiles(str(folder), max_bytes, unix_ms=count(1).__next__)


def contents(folder: Path) -> list[str]:
    """What is in the files, oldest first."""
    return [path.read_text() for path in sorted(folder.glob(PATTERN))]


def test_the_newest_lines_are_kept_within_the_size(tmp_path):
    """Whole files make room, the oldest first."""
    files = rotated(tmp_path / "new", 400 * FILES)
    for number in range(100):
        files.write(f"{number:099d}\n")
    files.close()
    kept = "".join(contents(tmp_path / "new")).split()
    assert sum(map(len, contents(tmp_path / "new"))) <= 400 * FILES
    assert [int(line) for line in kept] == list(range(100 - len(kept), 100))
    assert len(kept) >= 4 * (FILES - 1)


def test_a_clock_that_is_set_back_makes_no_file_older(tmp_path):
    """The newest lines are kept, not those from before; a foreign file of that kind does no harm."""
    (tmp_path / PATTERN.replace("*", "mine")).write_text(LINE)
    times = iter([*range(1000, 1010), *range(10, 100)])
    files = RotatedFiles(str(tmp_path), 400 * FILES, unix_ms=times.__next__)
    for number in range(100):
        files.write(f"{number:099d}\n")
    files.close()
    kept = [int(line) for text in contents(tmp_path) for line in text.split() if line.isdigit()]
    assert kept[-1] == 99
    assert kept == list(range(100 - len(kept), 100))


def test_files_of_other_processes_count_too(tmp_path):
    """Orchestrators may share a folder, before and after a restart."""
    for _ in range(3):
        files = rotated(tmp_path, 400 * FILES)
        for _ in range(30):
            files.write(LINE)
        files.close()
    assert sum(map(len, contents(tmp_path))) <= 400 * FILES


@pytest.mark.parametrize("remove", [Path.unlink, lambda path: path.rename(path.with_suffix(".away"))])
def test_no_line_goes_into_a_file_that_is_gone(tmp_path, remove):
    """Another process made room for its own, or somebody took the files away."""
    files = rotated(tmp_path, 400 * FILES)
    files.write(LINE)
    (path,) = tmp_path.glob(PATTERN)
    remove(path)
    assert files.write(LINE)
    assert contents(tmp_path) == [LINE]
    files.close()


def test_files_are_for_their_owner_alone(tmp_path):
    """They hold prompts."""
    files = rotated(tmp_path / "new", 10_000)
    files.write(LINE)
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_line_that_is_larger_than_a_file_is_left_out(tmp_path):
    """It would push out everything else."""
    files = rotated(tmp_path, 50 * FILES)
    files.write(LINE)
    assert contents(tmp_path) == []


def test_after_a_failed_write_the_next_line_begins_a_file(tmp_path):
    """So a line that was cut spoils no other one."""
    files = rotated(tmp_path, 10_000)
    files.write(LINE)
    file = files._file
    assert file is not None
    os.close(file.fileno())  # as a disk that fails
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write(LINE)
    files.write(LINE)
    files.close()
    assert contents(tmp_path) == [LINE, LINE]


def test_a_full_disk_gets_no_more_files(tmp_path):
    """However many lines come before there is room."""
    files = rotated(tmp_path, 10_000)
    files.write(LINE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(5):
            with pytest.raises(OSError, match="File too large"):
                files.write(LINE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files.write(LINE)
    files.close()
    assert contents(tmp_path) == [LINE, LINE]


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    """Found at the start."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="collect: cannot make the folder"):
        rotated(tmp_path / "file" / "below", 10_000)
