"""The training scripts make a pair, a head and an MTP layer that the services can run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.heads.eagle_checkpoint import read_head
from outrider.engine.heads.loading import load_head
from tests.integration.cluster import DEMO_TARGET, ROOT

TINY = "--minutes 0.05 --draft-minutes 0.05 --target tiny --draft tiny --vocabulary 512 --files 24"
SMALL_STEPS = "--batch 2 --window 64 --threads 1 --device cpu"


@pytest.mark.slow
def test_a_tiny_pair_is_trained_in_seconds(tmp_path):
    """A few seconds of training give two loadable models with one tokenizer, and their figures."""
    command = [sys.executable, "-m", "scripts.train_demo_pair", "--out", str(tmp_path)]
    arguments = [*TINY.split(), *SMALL_STEPS.split()]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "target: held-out loss" in done.stdout
    assert "draft: held-out loss" in done.stdout
    for name in ("target", "draft"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == 512
        assert AutoTokenizer.from_pretrained(tmp_path / name)("x = 1").input_ids[0] == 0


@pytest.mark.slow
def test_a_head_is_trained_in_seconds(tmp_path):
    """A few seconds give a head that is loaded."""
    command = [
        sys.executable,
        "-m",
        "scripts.train_eagle",
        "--target",
        str(DEMO_TARGET),
        "--out",
        str(tmp_path),
    ]
    small = [
        "--files",
        "24",
        "--batch",
        "2",
        "--window",
        "48",
        "--draft-vocabulary",
        "256",
        "--layers",
        "1,3",
    ]
    arguments = [*command, *small, "--minutes", "0.05"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config, tensors = read_head(str(tmp_path), str(DEMO_TARGET))
    assert config.feature_layers == (2, 4)
    assert tensors["lm_head.weight"].shape == (256, 256)


@pytest.mark.slow
def test_an_mtp_layer_is_trained_in_seconds(tmp_path):
    """A few seconds give the same target in another format, with a layer that is loaded."""
    command = [
        sys.executable,
        "-m",
        "scripts.train_mtp",
        "--target",
        str(DEMO_TARGET),
        "--out",
        str(tmp_path),
    ]
    small = ["--files", "24", "--batch", "2", "--window", "48", "--minutes", "0.05"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = torch.arange(5, 60)[None]
    with torch.no_grad():
        found = [AutoModelForCausalLM.from_pretrained(folder)(tokens) for folder in (tmp_path, DEMO_TARGET)]
    torch.testing.assert_close(found[0].logits, found[1].logits)
    head = load_head(str(tmp_path), "", kind="mtp", dtype="float32", device="cpu", threads=1)
    assert head.feature_layers == (6,)
