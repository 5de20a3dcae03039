"""Memory of the device."""

from __future__ import annotations

import pytest

from outrider import control_groups
from outrider.telemetry import device_memory as module
from outrider.telemetry.device_memory import device_memory

KB = 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8,000 kB, and the folder of its container, which has no limit yet."""
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000 kB\nMemFree:   100 kB\nMemAvailable:   6000 kB\nHugePages: 0\n"
    )
    monkeypatch.setattr(module, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "CONTAINER", tmp_path)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    return tmp_path


def test_the_cpu_has_the_memory_of_the_machine(machine) -> None:
    """What can be had without swapping counts as unused, page caches included."""
    assert device_memory("cpu") == (6000 * KB, 8000 * KB)
    (machine / "memory.max").write_text("max\n")
    assert device_memory("cpu") == (6000 * KB, 8000 * KB)


def test_a_container_has_what_it_is_allowed(machine) -> None:
    """What it holds of files counts as unused, but for files that are in memory only."""
    (machine / "memory.max").write_text(f"{4000 * KB}\n")
    (machine / "memory.current").write_text(f"{2000 * KB}\n")
    (machine / "memory.stat").write_text(f"anon 5\nfile {1500 * KB}\nshmem {500 * KB}\n")
    assert device_memory("cpu") == (3000 * KB, 4000 * KB)


def test_so_has_one_of_an_older_system(machine) -> None:
    """Version 1 of control groups has other files; without a limit there is a very large number."""
    folder = machine / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert device_memory("cpu") == (6000 * KB, 8000 * KB)
    (folder / "memory.limit_in_bytes").write_text(f"{4000 * KB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{2000 * KB}\n")
    (folder / "memory.stat").write_text(
        f"cache 1\nshmem 2\ntotal_cache {1500 * KB}\ntotal_shmem {500 * KB}\n"
    )
    assert device_memory("cpu") == (3000 * KB, 4000 * KB)


def test_a_service_has_what_its_unit_is_allowed(machine) -> None:
    """A unit's own limit, or that of a slice around it."""
    for folder, limit in (("a.slice", 4000 * KB), ("a.slice/b.service", 5000 * KB)):
        (machine / folder).mkdir()
        (machine / folder / "memory.max").write_text(f"{limit}\n")
        (machine / folder / "memory.current").write_text(f"{3000 * KB}\n")
        (machine / folder / "memory.stat").write_text("file 0\nshmem 0\n")
    (machine / "groups").write_text("0::/a.slice/b.service\n")
    assert device_memory("cpu") == (1000 * KB, 4000 * KB)


def test_a_container_has_no_more_than_the_machine(machine) -> None:
    """Other containers may use the memory."""
    (machine / "memory.max").write_text(f"{7900 * KB}\n")
    (machine / "memory.current").write_text("0\n")
    (machine / "memory.stat").write_text("file 0\nshmem 0\n")
    assert device_memory("cpu") == (6000 * KB, 7900 * KB)


def test_a_system_that_does_not_tell_has_none(tmp_path, monkeypatch) -> None:
    """Zeros, so that a scrape never fails."""
    monkeypatch.setattr(module, "MEMORY_INFO", tmp_path / "nothing")
    assert device_memory("") == (0, 0)
