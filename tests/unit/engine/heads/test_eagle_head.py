"""A head computes what it computes spelled out in plain torch, in a chain and in a tree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.cpu.layer import Angles
from outrider.engine.fused_decoder.rotation import Rotations
from outrider.engine.heads.eagle_head import EagleHead
from outrider.engine.heads.loading import load_head
from outrider.engine.heads.store import RowStore, seen_in_tree
from outrider.protocol.errors import ModelError
from tests.heads import DRAFT_TOKENS, PlainHead, build_head, head_config, head_tensors, save_head
from tests.models import build_model

TOKENS = [3, 77, 120, 9, 30, 31, 8]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of 300 tokens."""
    return build_model("llama", tmp_path_factory.mktemp("target"), vocab_size=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for it."""
    return build_head(tmp_path_factory.mktemp("head"))


def load(folder: Path, target: Path, **changes: str) -> EagleHead:
    """In float32 on the CPU, unless other things are asked for."""
    return load_head(str(folder), str(target), **{"dtype": "float32", "device": "cpu", **changes}, threads=1)


def computed(head, tokens, features, positions, seen):
    """Features of the next rows and logits of all rows at once."""
    queries, entries, base = head.rows(torch.tensor(tokens), features, torch.tensor(positions))
    return head.outputs(base, head.mix(queries, entries, seen))


@pytest.mark.parametrize("backend", ["auto", "onednn"])
def test_a_text_is_computed_as_spelled_out(folder, target, backend):
    """Every row of a causal chain, on whatever multiplies."""
    head, plain = load(folder, target, cpu_backend=backend), PlainHead(folder, target)
    raw = torch.randn(len(TOKENS), 128)
    seen = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    positions = list(range(1, len(TOKENS) + 1))
    hidden, logits = computed(head, TOKENS, head.fuse(raw), positions, seen)
    expected_hidden, expected = plain(TOKENS, plain.fuse(raw), positions, seen)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_rotations_are_made_on_the_device_of_the_head():
    """A factor of all pairs is no tensor of the CPU, which another device would refuse."""
    angles = Angles(torch.ones(4, device="meta"), 1.5)
    assert Rotations(torch.arange(3, device="meta"), angles).complex.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"eagle_config": 5}, "cannot be loaded"),
        ({"rope_scaling": {"rope_type": "curly"}}, "rope_scaling.rope_type is 'curly'"),
        ({"max_position_embeddings": 1.5}, r"max_position_embeddings is 1\.5"),
    ],
)
def test_a_broken_config_is_an_error_of_the_model(tmp_path, target, changes, named):
    """As with any other model: the process ends with one sentence."""
    broken = save_head(tmp_path / "head", head_tensors(), head_config(**changes))
    with pytest.raises(ModelError, match=named):
        load(broken, target)


def test_a_tree_sees_the_text_and_its_own_path(folder, target):
    """Two branches below a text: each row sees what is above it and nothing of its neighbours."""
    head, plain = load(folder, target), PlainHead(folder, target)
    raw = torch.randn(len(TOKENS), 128)
    paths = [[11], [11, 12], [13]]
    inside = seen_in_tree(4, paths, [11, 12, 13])
    assert inside.shape == (3, 7)
    text = torch.ones(4, 4, dtype=torch.bool).tril()
    seen = torch.cat([torch.cat([text, torch.zeros(4, 3, dtype=torch.bool)], 1), inside])
    positions = [1, 2, 3, 4, 5, 6, 5]
    _, expected = plain(TOKENS, plain.fuse(raw), positions, seen)
    queries, entries, base = head.rows(torch.tensor(TOKENS), head.fuse(raw), torch.tensor(positions))
    store = RowStore()
    store.append(entries[:1])
    store.append(entries[1:4])
    mixed = head.mix(queries[4:], torch.cat([store.entries, entries[4:]]), inside)
    torch.testing.assert_close(head.outputs(base[4:], mixed)[1], expected[4:], atol=1e-4, rtol=1e-4)


def test_only_tokens_of_the_draft_vocabulary_are_proposed(folder, target):
    """d2t says which they are; the others cannot be."""
    head = load(folder, target)
    _, logits = computed(head, [7], head.fuse(torch.randn(1, 128)), [1], torch.ones(1, 1, dtype=torch.bool))
    proposed = torch.isfinite(logits[0]).nonzero()[:, 0].tolist()
    assert proposed == [5 * number for number in range(1, DRAFT_TOKENS + 1)]


def test_what_it_adds_to_may_be_the_norm(folder, target, tmp_path):
    """Heads of vLLM's speculators may say so."""
    other = build_head(tmp_path / "other", norm_before_residual=True)
    raw = torch.randn(2, 128)
    seen = torch.ones(2, 2, dtype=torch.bool).tril()
    heads = [load(each, target) for each in (folder, other)]
    plain = heads[0].rows(torch.tensor([3, 4]), heads[0].fuse(raw), torch.tensor([1, 2]))[2]
    normed = heads[1].rows(torch.tensor([3, 4]), heads[1].fuse(raw), torch.tensor([1, 2]))[2]
    weight = head_tensors()["midlayer.hidden_norm.weight"]
    expected = torch.nn.functional.rms_norm(plain, (64,), weight, 1e-5)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)
    found = [computed(head, [3, 4], head.fuse(raw), [1, 2], seen)[1] for head in heads]
    assert not torch.allclose(*found)


def test_a_head_of_the_whole_vocabulary_may_share_the_output_layer(target, tmp_path):
    """Without a map and an output layer of its own it proposes every token with the target's."""
    tensors = {
        name: value for name, value in head_tensors().items() if name not in ("d2t", "t2d", "lm_head.weight")
    }
    folder = save_head(tmp_path / "whole", tensors, head_config(draft_vocab_size=None))
    head = load(folder, target)
    _, logits = computed(head, [7], head.fuse(torch.randn(1, 128)), [1], torch.ones(1, 1, dtype=torch.bool))
    assert logits.shape == (1, 300)
    assert torch.isfinite(logits).all()


def test_sixteen_bits_come_close(folder, target):
    """The kernels of bfloat16 compute the same head, rounded."""
    head, plain = load(folder, target, dtype="bfloat16"), PlainHead(folder, target)
    raw = torch.randn(3, 128)
    seen = torch.ones(3, 3, dtype=torch.bool).tril()
    _, logits = computed(head, TOKENS[:3], head.fuse(raw), [1, 2, 3], seen)
    _, expected = plain(TOKENS[:3], plain.fuse(raw), [1, 2, 3], seen)
    kept = torch.isfinite(expected)
    assert (logits[kept] - expected[kept]).abs().mean() < 0.03 * expected[kept].abs().mean()
