"""Which cores a process may use, and how many threads it starts on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import control_groups, cores
from outrider.cores import Cores, arranged, default_threads, find_cores


def _alone(count: int) -> dict[int, str]:
    return {core: str(core) for core in range(count)}


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the limits of a container with four cores."""
    monkeypatch.setattr(control_groups, "CONTAINER", tmp_path)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores, "allowed_cores", lambda: [0, 1, 2, 3])
    return tmp_path


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        (_alone(3), Cores((0, 1, 2), 3)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, Cores((0, 2, 1, 3), 2)),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, Cores((0, 1, 2, 3), 2)),
        ({5: "4-5", 6: "6-7", 7: "6-7"}, Cores((5, 6, 7), 2)),
    ],
)
def test_a_hardware_thread_of_each_core_comes_first(siblings: dict[int, str], expected: Cores) -> None:
    """However the system numbers them; the second thread of a core hardly computes faster."""
    assert arranged(siblings, None) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, Cores((0, 1, 2, 3), 4)),
        (4.0, Cores((0, 1, 2, 3), 4)),
        (2.0, Cores((), 2)),
        (1.5, Cores((), 2)),
        (0.1, Cores((), 1)),
    ],
)
def test_a_container_s_limit_counts(limit: float | None, expected: Cores) -> None:
    """Below the number of cores, other containers have the same cores, and nothing is pinned."""
    assert arranged(_alone(4), limit) == expected


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 4), ("250000 100000", 3), ("nonsense", 4)])
def test_the_limit_is_read_from_the_container(text: str, expected: int, container: Path) -> None:
    """Where there is one."""
    (container / "cpu.max").write_text(text)
    assert find_cores().threads == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 4), (250000, 3)])
def test_so_is_that_of_an_older_system(quota: int, expected: int, container: Path) -> None:
    """Version 1 of control groups has a file for each number."""
    (container / "cpu").mkdir()
    (container / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (container / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert find_cores().threads == expected


@pytest.mark.parametrize(
    ("groups", "folder"),
    [
        ("0::/system.slice/a.service\n", "system.slice/a.service"),
        ("0::/system.slice/a.service\n", "system.slice"),
        ("3:cpuset:/b\n1:cpu,cpuacct:/a\n0::/c\n", "cpu/a"),
        ("0::/../outside\n", "."),
    ],
)
def test_limits_of_groups_outside_containers_count_too(groups: str, folder: str, container: Path) -> None:
    """Such as a service's, by a line of its unit; a group has no more than those that it lies in."""
    (container / "groups").write_text(groups)
    (container / folder).mkdir(parents=True, exist_ok=True)
    (container / folder / "cpu.max").write_text("150000 100000\n")
    assert find_cores() == Cores((), 2)


def test_where_a_sandbox_refuses_to_pin_there_are_threads_alone(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes run on all cores then."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.sched_setaffinity", refuse, raising=False)
    assert find_cores() == Cores((), 4)


@pytest.mark.parametrize(("told", "expected"), [("", 4), ("2", 2), ("8", 4), ("0", 4), ("2,2", 4)])
def test_a_process_starts_at_most_as_many_threads_as_openmp_would(
    told: str, expected: int, container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS is what users of torch know."""
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert default_threads() == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are pinned to on Linux alone")
def test_cores_that_others_have_are_not_used() -> None:
    """The process may be pinned already."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert find_cores() == Cores((min(before),), 1)
    finally:
        os.sched_setaffinity(0, before)
