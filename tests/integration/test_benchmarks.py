"""The comparison runs as a whole: services, proxies, transformers, texts, table, JSON and picture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.cluster import ROOT


@pytest.mark.slow
def test_a_small_comparison_finds_equal_texts(tmp_path):
    """Own arms and transformers, with and without a network, alone and two at once, greedy and sampled."""
    out = tmp_path / "compare.json"
    grid = ["--concurrency", "1", "2", "--temperatures", "0", "1", "--round-trip-ms", "0", "1"]
    size = ["--pair", "demo", "--dtype", "float32", "--tokens", "12", "--requests", "2", "--min-turns", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *size, *grid, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    arms = {row["arm"] for row in result["rows"]}
    assert arms == {"off", "sequential", "auto", "HF generate 2t", "HF assisted 2t", "HF assisted K=5 2t"}
    assert len({tuple(row["cell"].items()) for row in result["rows"]}) == 8
    assert all(one["near_tie"] for one in result["differences"])
    assert "auto, T = 1: 8 of 8" in done.stdout
