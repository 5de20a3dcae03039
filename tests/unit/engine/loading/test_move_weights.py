"""Weights reach the device one by one, and the host holds no copy of them."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from outrider.engine.loading import loader, move_weights
from tests.models import build_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_all_of_a_model_moves(folder_of, architecture, monkeypatch):
    """Parameters and buffers alike, and tied weights stay one."""
    network, _ = loader._from_files(str(folder_of(architecture)), "bfloat16", False)
    before = {name: each.clone() for name, each in network.state_dict().items()}
    tied = len(list(network.parameters()))
    old = [each.detach() for each in network.parameters()]  # held, so that their memory is not used again
    original = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **named: original(self, *args, **named).clone()
    )
    move_weights.move_weights(network, CPU, lambda _: None)
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())
    assert len(list(network.parameters())) == tied
    places = [{each.data_ptr() for each in tensors} for tensors in (old, network.parameters())]
    assert not places[0] & places[1], "each is elsewhere now"


def test_the_way_is_said(folder_of, monkeypatch):
    """How much of how much, and where."""
    network, _ = loader._from_files(str(folder_of("llama")), "auto", False)
    total = sum(weight.nbytes for weight in network.parameters())
    monkeypatch.setattr(move_weights, "PROGRESS_BYTES", total // 3)
    said: list[str] = []
    move_weights.move_weights(network, CPU, said.append)
    assert len(said) in (2, 3)
    assert said[0].endswith("GB of weights are on cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_takes_no_memory_of_its_own(tmp_path):
    """Weights that keep their dtype are pages of the mapped file."""
    size = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    folder = build_model("llama", tmp_path, **size, head_dim=128)
    file = (folder / "model.safetensors").stat().st_size
    assert file > 100 * 2**20
    gc.collect()
    before = _own_bytes()
    network, _ = loader._from_files(str(folder), "auto", False)
    assert sum(float(weight.detach().sum()) for weight in network.parameters()) != 0
    assert _own_bytes() - before < file / 4


def _own_bytes() -> int:
    """Memory of this process that is no file's."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
