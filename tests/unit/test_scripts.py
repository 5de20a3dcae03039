"""What the project's scripts make: the settings page, widened checkpoints, demo figures."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts import document_settings
from scripts.child import ROOT
from scripts.deepen import Shape, deepen
from scripts.widen import widen
from tests.models import build_model


def test_the_settings_page_is_current():
    """docs/configuration.md is what `make docs` would write now."""
    assert document_settings.PAGE.read_text(encoding="utf-8") == document_settings.page(), "run `make docs`"


@pytest.mark.parametrize(
    "script", ["dashboards", "document_metrics", "document_settings", "generate_protos", "lock"]
)
def test_a_script_that_writes_files_explains_itself(script, monkeypatch, capsys):
    """With --help it prints what it does and ends."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{ROOT}/scripts/{script}.py", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out[:6]) == (0, "usage:")


@pytest.mark.parametrize("command", document_settings.COMMANDS, ids=lambda command: command.__name__)
def test_the_settings_page_names_every_setting(command):
    """A setting is in the table of its command, or in one that services share."""
    named = set(re.findall(r"^- `(\w+)", document_settings.page(), re.M))
    assert set(command.model_fields) <= named


@pytest.fixture
def widened(tmp_path):
    """A tiny Llama and its widened copy, as folders."""
    source = build_model("llama", tmp_path / "source")
    widen(source, tmp_path / "wide", 500)
    return source, tmp_path / "wide"


def test_widening_keeps_every_logit(widened):
    """The widened model computes what the original does, up to the rounding of longer sums."""
    tokens = torch.arange(2, 42)[None]
    source, wide = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in widened)
    with torch.no_grad():
        difference = (source(tokens).logits - wide(tokens).logits).abs().max()
    assert difference < 1e-4


def test_widening_adds_weight_traffic(widened):
    """The widened model has as many more parameters as asked for, and they are not zero."""
    source, wide = (AutoModelForCausalLM.from_pretrained(folder) for folder in widened)
    layers, hidden, added = 3, 64, 500 - 96
    assert wide.num_parameters() - source.num_parameters() == layers * 3 * hidden * added
    assert wide.model.layers[0].mlp.gate_proj.weight[-1].abs().sum() > 0


def test_widening_keeps_the_tokenizer(widened):
    """Source and widened copy are a pair: same tokenizer, same configuration but for the width."""
    source, wide = widened
    assert (source / "tokenizer.json").read_bytes() == (wide / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in widened)
    assert {key for key in after if before.get(key) != after[key]} == {"intermediate_size"}


@pytest.mark.parametrize("size", [10, 96])
def test_narrowing_is_refused(tmp_path, size):
    """A width that is not larger is refused with the reason."""
    source = build_model("llama", tmp_path / "source")
    with pytest.raises(ValueError, match=f"intermediate_size below {size}"):
        widen(source, tmp_path / "wide", size)


def test_other_architectures_are_refused(tmp_path):
    """A checkpoint without a Llama-style MLP is refused with the reason."""
    source = build_model("gpt_neox", tmp_path / "source")
    with pytest.raises(ValueError, match="no Llama-style MLP"):
        widen(source, tmp_path / "wide", 500)


def test_a_deeper_model_computes_the_same(tmp_path):
    """It has more layers, heads and numbers, and the logits of the original."""
    source = build_model(
        "llama", tmp_path / "source", num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    count = deepen(source, tmp_path / "deep", Shape(256, 5, 8, 4, 300))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, tmp_path / "deep")
    )
    tokens = torch.arange(2, 42)[None]
    with torch.no_grad():
        difference = (before(tokens).logits - after(tokens).logits).abs().max()
    assert difference < 1e-4
    assert count == after.num_parameters() > 4 * before.num_parameters()
    assert (source / "tokenizer.json").read_bytes() == (tmp_path / "deep/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("shape", "message"),
    [(Shape(32, 5, 8, 4, 300), "must not be larger"), (Shape(64, 5, 8, 1, 300), "the same")],
)
def test_a_shape_without_room_is_refused(tmp_path, shape, message):
    """The error says what does not fit."""
    source = build_model(
        "llama", tmp_path / "source", num_attention_heads=4, num_key_value_heads=1, head_dim=16
    )
    with pytest.raises(ValueError, match=message):
        deepen(source, tmp_path / "deep", shape)
