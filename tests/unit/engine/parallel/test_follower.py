"""How the process of a rank other than 0 ends."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from structlog.testing import capture_logs

from outrider.config import VerifyConfig
from outrider.engine.parallel import follower
from outrider.engine.parallel.order import Order


def test_a_rank_without_memory_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 notices that it has ended; the log says which settings to lower."""

    def exhausted(order: Order) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nadvice")

    order = Order(config=VerifyConfig(model="m", tensor_parallel=2), rank=1, meeting="", seconds=1.0)
    given = io.TextIOWrapper(io.BytesIO(order.model_dump_json().encode() + b"\n"))
    monkeypatch.setattr(sys, "stdin", given)
    for name in ("_end_with_input", "configure_logging", "pin_cpus"):
        monkeypatch.setattr(follower, name, lambda *_: None)
    monkeypatch.setattr(follower, "carry_out", exhausted)
    with capture_logs() as logs:
        assert follower.main() == 1
    assert logs[0]["problem"].startswith(
        "no memory is left (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )
