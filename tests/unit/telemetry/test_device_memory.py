"""Memory of the device."""

from __future__ import annotations

from outrider.telemetry import device_memory as module
from outrider.telemetry.device_memory import device_memory


def test_the_cpu_has_the_memory_of_the_machine(tmp_path, monkeypatch) -> None:
    """What can be had without swapping counts as unused, page caches included."""
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 8000 kB\nMemFree:   100 kB\nMemAvailable:   6000 kB\nHugePages: 0\n")
    monkeypatch.setattr(module, "MEMORY_INFO", info)
    assert device_memory("cpu") == (6000 * 1024, 8000 * 1024)


def test_a_system_that_does_not_tell_has_none(tmp_path, monkeypatch) -> None:
    """Zeros, so that a scrape never fails."""
    monkeypatch.setattr(module, "MEMORY_INFO", tmp_path / "nothing")
    assert device_memory("") == (0, 0)
