"""What goes into layers, taken from forwards: that of transformers, in chunks, trees and batches."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.features import from_bytes, to_bytes
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment

TOKENS = [(7 * i + 3) % 290 for i in range(24)]
LAYERS = (0, 1, 2, 3)
"""The last is the output layer."""


def expected(pair, tokens):
    """[layers, T, C] by transformers."""
    with torch.no_grad():
        states = pair.plain(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in LAYERS])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2", "deepseek_v3", "gpt_neo"])
def test_rows_are_those_of_transformers(pair_of, architecture):
    """A chunk, a tree and another text in one batch; fused and as modules; logits stay what they are."""
    pair = pair_of(architecture)
    runner = ModelRunner(pair.loaded, 64, 4)
    first, other = (SequenceKv.open(runner.pool, []) for _ in range(2))
    _, taken = runner.forward_with_features([Segment(first, TOKENS[:9], None, [8], range(2, 9))], LAYERS)
    found = torch.stack([taken[layer] for layer in LAYERS])
    torch.testing.assert_close(found, expected(pair, TOKENS[:9])[:, 2:9], atol=1e-4, rtol=1e-4)
    runner.commit(first, range(9), TOKENS[:9])
    tree = Segment(first, [5, 6, 7], [-1, 0, 0], range(3), range(3))
    text = Segment(other, TOKENS[:12], None, [11], [4, 11])
    logits, taken = runner.forward_with_features([tree, text], LAYERS)
    found = torch.stack([taken[layer] for layer in LAYERS])
    paths = [[*TOKENS[:9], 5], [*TOKENS[:9], 5, 6], [*TOKENS[:9], 5, 7]]
    rows = [expected(pair, path)[:, -1] for path in paths]
    rows += [expected(pair, TOKENS[:12])[:, place] for place in (4, 11)]
    torch.testing.assert_close(found, torch.stack(rows, 1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[-1], pair.expected(TOKENS[:12])[-1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("layers", [(1,), (1, 3)])
def test_taking_them_changes_no_bit(pair_of, layers):
    """Logits of a forward with features are those of one without, which takes none."""
    runner = ModelRunner(pair_of("llama").loaded, 64, 4)
    kv = [SequenceKv.open(runner.pool, []) for _ in range(2)]
    plain = runner.forward([Segment(kv[0], TOKENS, None, range(24))])
    assert not runner.tap.taken
    segment = Segment(kv[1], TOKENS, None, range(24), [0])
    with_features, taken = runner.forward_with_features([segment], layers)
    assert plain.equal(with_features)
    assert [*taken] == [*layers]
    assert not runner.tap.layers, "the next forward takes nothing"


def test_rows_cross_the_wire():
    """As bfloat16, row by row."""
    rows = torch.randn(3, 8)
    data = to_bytes(rows)
    assert len(data) == 3 * 8 * 2
    assert from_bytes(data, 8).equal(rows.to(torch.bfloat16))
    assert to_bytes(torch.tensor([[1.0]])) == b"\x80\x3f", "little-endian"
