"""Every benchmark starts."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.integration.cluster import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "ArgumentParser" in (text := path.read_text()) or "new_parser(" in text
    if '__name__ == "__main__"' in text
)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What `scripts.console.run` sets is put back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_shows_its_help(module, monkeypatch, capsys):
    """All that it imports is there by the names that it uses."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(module, run_name="__main__")
    assert not caught.value.code
    assert "usage:" in capsys.readouterr().out


def test_the_page_names_every_benchmark():
    """docs/benchmarks.md lists what can be run."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    commands = [module.removeprefix("benchmarks.") for module in MODULES if "workers" not in module]
    assert len(commands) > 10
    assert not [command for command in commands if f"`{command}`" not in page]
