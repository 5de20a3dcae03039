"""Sections of the benchmark of GPUs stand alone: time on a GPU is scarce."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone")


def test_a_section_that_fails_or_takes_too_long_costs_no_other(tmp_path: Path, monkeypatch) -> None:
    """What each has said is on disk, and what became of it."""
    from benchmarks import gpu
    from benchmarks.gpu_bench import Bench

    def broken(bench: Bench) -> None:
        bench.say("half", "1")
        raise AssertionError("no such kernel")

    def endless(bench: Bench) -> None:
        while True:
            time.sleep(0.01)

    def whole(bench: Bench) -> None:
        bench.say("all", "2")

    monkeypatch.setattr(gpu, "SECTIONS", ((broken, 10), (endless, 1), (whole, 10)))
    bench = Bench(torch.device("cpu"), torch.float32, False, 1, tmp_path / "new" / "gpu.json")
    gpu.run_sections(bench, [])
    assert [list(line.values())[:3] for line in json.loads(bench.out.read_text())] == [
        ["broken", "half", "1"],
        ["broken", "FAILED", "AssertionError: no such kernel"],
        ["endless", "FAILED", "TimeoutError: longer than 1 s"],
        ["whole", "all", "2"],
    ]
