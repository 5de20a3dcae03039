"""Launches that overlap against launches that follow each other."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import Segment

TOKENS = 300


def decoded(loaded) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after one, by graphs of one token and of trees in turn, and the last logits."""
    from outrider.engine.gpu.runner import GraphRunner

    runner = GraphRunner(loaded, 64, 16, buckets=(1, 8))
    kv = SequenceKv.open(runner.pool, [])
    tokens = [7]
    for index in range(TOKENS):
        if index % 3 == 2:
            runner.forward([Segment(kv, [5, 6, 7, 8], [-1, -1, 1, 2], range(4))])
            kv.rollback()
        logits = runner.forward([Segment(kv, tokens[-1:], None, [0])])
        runner.commit(kv, [0], tokens[-1:])
        tokens += logits.argmax(-1).tolist()
    return tokens, logits


def test_overlap_changes_no_bits(device, loaded, monkeypatch):
    """Each kernel waits for what it reads: a kernel that did not would now and then read something else."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("launches overlap on capability 9.0 and newer")
    overlapped = decoded(loaded)
    for module in ("attention", "one_row", "operations"):
        monkeypatch.setattr(f"outrider.engine.gpu.{module}.overlapping", lambda device: {"OVERLAP": False})
    in_turn = decoded(loaded)
    assert overlapped[0] == in_turn[0]
    assert torch.equal(overlapped[1], in_turn[1])
