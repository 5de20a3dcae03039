"""Models whose modules compute attention themselves run over pages as any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.cli.plan.checkpoint import read_checkpoint
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading import loader
from outrider.engine.loading.attention_shapes import attention_calls
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests.models import OWN_ATTENTION, build_model

Folders = Callable[[str], Path]
FALCONS: dict[str, dict[str, Any]] = {
    "one kv head": {"new_decoder_architecture": False, "multi_query": True},
    "alibi": {
        "new_decoder_architecture": False,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "alibi": True,
        "num_kv_heads": 4,
    },
}
FALCONS["alibi, one kv head"] = {**FALCONS["one kv head"], "alibi": True}
FALCONS["alibi, two kv heads"] = {"alibi": True}
KV_HEADS = {"one kv head": 1, "alibi": 4, "alibi, one kv head": 4, "alibi, two kv heads": 4}
CONTEXT = 512


def at_last_positions(folder: Path) -> None:
    """The logits of a text as long as the context, in chunks, are those of transformers."""
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1)
    tokens = torch.randint(300, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = ModelRunner(loaded, CONTEXT // 16, 16)
    kv = SequenceKv.open(runner.pool, [])
    for chunk in (tokens[:500], tokens[500:]):
        found = runner.forward([Segment(kv, chunk, None, range(len(chunk)))])
        runner.commit(kv, range(len(chunk)), chunk)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = plain(torch.tensor([tokens])).logits[0, 500:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)
    assert found.argmax(-1).tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("architecture", ["gpt_neo", "bloom", "mpt"])
def test_a_text_as_long_as_the_context(architecture: str, folder_of: Folders) -> None:
    """Windows and what keys carry of positions hold far beyond the check at load."""
    at_last_positions(folder_of(architecture))


@pytest.mark.parametrize("kind", FALCONS)
def test_falcons_of_other_kinds(kind: str, tmp_path: Path) -> None:
    """The 7B's and the RW's; as many keys and values are kept as `plan` says."""
    folder = build_model("falcon", tmp_path, **FALCONS[kind])
    at_last_positions(folder)
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1)
    assert loaded.geometry.kv_heads == KV_HEADS[kind]
    assert read_checkpoint(str(folder)).kv_numbers == loaded.geometry.numbers_per_token


@pytest.mark.parametrize("architecture", OWN_ATTENTION)
def test_a_model_computes_as_before_afterwards(architecture: str, folder_of: Folders) -> None:
    """Looking at what its layers hand over leaves nothing behind."""
    network = AutoModelForCausalLM.from_pretrained(folder_of(architecture)).eval().requires_grad_(False)
    tokens = torch.tensor([[5, 6, 7]])
    before = network(tokens).logits
    assert [*attention_calls(network)] == [0, 1, 2]
    assert torch.equal(network(tokens).logits, before)


def test_skipped_layers_are_counted_anew(folder_of: Folders) -> None:
    """GPT-Neo's too, which have another name for their number."""
    folder = str(folder_of("gpt_neo"))
    loaded = load_model(folder, dtype="float32", device="cpu", threads=1, skipped_layers=[0])
    assert loaded.geometry.num_layers == 2


def test_positions_are_not_kept_in_8_bits(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far ones would be rounded; the check at load is too short to see it."""
    monkeypatch.setattr(loader, "check_kv_dtype", lambda *_: None)
    with pytest.raises(ModelError, match=r"fp8 .*keys carry positions"):
        load_model(str(folder_of("bloom")), dtype="bfloat16", device="cpu", threads=1, kv_dtype="fp8")
