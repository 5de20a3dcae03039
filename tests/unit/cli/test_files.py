"""Files that flags name."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from outrider.cli.files import write_file
from outrider.protocol.errors import InvalidRequest


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """An empty picture would be taken for one; the sentence names the flag and the file."""
    path, (soft, hard) = tmp_path / "steps.svg", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))  # fails as a full disk does, after five bytes
    try:
        with pytest.raises(InvalidRequest, match=r"--output: cannot write '.*steps.svg'"):
            write_file("--output", str(path), "<svg></svg>")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()
