"""Forwards of random models with the shapes of others."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import shapes
from benchmarks.shapes import parse_step

TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "fused": TINY | {"model_type": "qwen3"},
    "recurrent": TINY
    | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 16},
}


@pytest.mark.parametrize("kind", CASES)
def test_each_step_has_a_row(kind, monkeypatch, capsys) -> None:
    """Its name, the time of the plain arm, and for each other arm the time and what it is ÷ plain."""
    monkeypatch.setitem(shapes.SHAPES, kind, CASES[kind])
    steps = ["chain-1", "tree-9", "prompt-20"]
    flags = ["--dtype", "float32", "--context", "8", "--rounds", "2", "--steps", *steps]
    monkeypatch.setattr(sys, "argv", ["shapes", kind, *flags])
    assert shapes.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(steps))]
    assert [row[0] for row in rows] == steps
    assert all(float(number) > 0 for row in rows for number in row[1:4])


@pytest.mark.parametrize(("name", "levels"), [("tree-5", 5), ("tree-9", 5), ("tree-16", 5), ("tree-1", 1)])
def test_a_tree_has_at_most_five_levels(name: str, levels: int) -> None:
    """However many candidates it has; five are a chain."""
    parents, depths = parse_step(name).parents() or [], [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    assert len(parents) == parse_step(name).count
    assert max(depths) == levels


@pytest.mark.parametrize("text", ["", "chain", "chain-0", "bush-3", "tree-9-"])
def test_a_step_that_is_none_is_refused(text: str) -> None:
    """With examples of steps."""
    with pytest.raises(argparse.ArgumentTypeError, match="prompt-300"):
        parse_step(text)
