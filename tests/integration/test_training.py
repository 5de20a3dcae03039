"""The training script makes a pair that the services can run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.cluster import ROOT

TINY = "--minutes 0.05 --draft-minutes 0.05 --target tiny --draft tiny --vocabulary 512 --files 24"
SMALL_STEPS = "--batch 2 --window 64 --threads 1 --device cpu"


@pytest.mark.slow
def test_a_tiny_pair_is_trained_in_seconds(tmp_path):
    """A few seconds of training give two loadable models with one tokenizer, and their figures."""
    command = [sys.executable, "scripts/train_demo_pair.py", "--out", str(tmp_path)]
    arguments = [*TINY.split(), *SMALL_STEPS.split()]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "target: held-out loss" in done.stdout
    assert "acceptance at T = 0.7" in done.stdout
    for name in ("target", "draft"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == 512
        assert AutoTokenizer.from_pretrained(tmp_path / name)("x = 1").input_ids[0] == 0
