"""The sampling kernels compute the same on a processor without vector extensions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from outrider.engine.cpu.kernels.compiling import available
from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import SamplingRow
from outrider.sampling.history import History

PROGRAM = """
from outrider.sampling import chooser
from tests.integration.test_old_processor import asked
for logits, rows in asked():
    ranked = chooser.rank(logits, rows, 4, 1.2, ())
    print(chooser.choose(logits, rows, ()), [ranking.tokens for ranking in ranked])
"""


def asked() -> list[tuple[torch.Tensor, list[SamplingRow]]]:
    """Logits and rows at some positions."""
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.01, seed=3),
        SamplingParams(),
    ]
    logits = torch.randn(len(params), 3001, generator=torch.Generator().manual_seed(5)) * 3
    return [
        (
            logits,
            [SamplingRow(each, position + index, index, History([])) for index, each in enumerate(params)],
        )
        for position in range(0, 200, 10)
    ]


@pytest.mark.skipif(not available(), reason="the kernels need the package numba")
def test_an_old_processor_chooses_the_same_tokens() -> None:
    """Vectors are cut into what there is."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    expected = []
    for logits, rows in asked():
        ranked = chooser._rank_in_torch(logits, rows, [1.2] * len(rows), chooser._RIVALS, 4)
        expected.append(f"{chooser._choose_in_torch(logits, rows)} {[ranking.tokens for ranking in ranked]}")
    assert done.stdout.splitlines() == expected
