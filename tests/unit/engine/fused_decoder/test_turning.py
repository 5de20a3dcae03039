"""How layers turn queries and keys is found out from what they hand to attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from outrider.engine.fused_decoder import FusedDecoder, NotFused
from outrider.engine.fused_decoder.decoder import Growth, Rope
from outrider.engine.fused_decoder.rotation import rotate
from outrider.engine.fused_decoder.turning import Observed, Turn, turns_of
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model

WIDTH, POSITION = 16, 500
HEADS = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def rope(share: float, base: float = 10000.0) -> Rope:
    """One that turns this share of a head."""
    turning = int(WIDTH * share)
    return Rope(base ** -(torch.arange(0, turning, 2) / turning), 1.0)


def turned(rope: Rope, position: int, *, neighbours: bool) -> Tensor:
    """HEADS as a layer has them at a position."""
    made, turning = HEADS.clone(), 2 * len(rope.frequencies)
    pairs = (
        made[:, :turning].unflatten(1, (-1, 2)) if neighbours else made[:, :turning].unflatten(1, (2, -1)).mT
    )
    angles = rope.frequencies * position
    first, second = pairs.unbind(-1)
    both = torch.stack(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )
    made[:, :turning] = (both if neighbours else both.mT).flatten(1)
    return made


def observed(rope: Rope, *, neighbours: bool = False) -> Observed:
    """What is seen of such a layer."""
    return Observed(POSITION, 2, HEADS, turned(rope, POSITION, neighbours=neighbours))


def scores(turn: Turn, position: int) -> Tensor:
    """Products [3, 3] of heads at this position and at 0, as the engine turns them."""
    heads = HEADS if turn.order is None else HEADS[:, turn.order]

    def at(place: int) -> Tensor:
        angles = turn.rope.frequencies * place
        return rotate(heads[None], torch.polar(torch.ones_like(angles), angles)[None, None])[0]

    return at(position) @ at(0).T


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("neighbours", [False, True])
def test_scores_are_those_of_the_layer(share: float, neighbours: bool, whole: bool) -> None:
    """Halves and neighbours, of a head or a part of it; all columns get an angle where norms need it."""
    own = rope(share)
    (turn,) = turns_of([observed(own, neighbours=neighbours)], [own], [WIDTH], whole=whole)
    expected = turned(own, 7, neighbours=neighbours) @ HEADS.T
    torch.testing.assert_close(scores(turn, 7), expected)
    assert 2 * len(turn.rope.frequencies) == (WIDTH if whole else share * WIDTH)
    assert (turn.order is None) == (not neighbours and (share == 1.0 or not whole))


@pytest.mark.parametrize("whole", [False, True])
def test_layers_may_turn_differently(whole: bool) -> None:
    """By one of several ropes, or not at all; those that are alike share a turn."""
    ropes, none = [rope(1.0), rope(1.0, 1e6)], Rope(torch.empty(0), 1.0)
    layers = [observed(ropes[1]), observed(none), observed(ropes[0]), observed(ropes[1])]
    turns = turns_of(layers, ropes, [WIDTH] * 4, whole=whole)
    assert turns[0] is turns[3]
    assert len(set(map(id, turns))) == 3
    for turn, own in zip(turns, (ropes[1], none, ropes[0]), strict=False):
        torch.testing.assert_close(scores(turn, 7), turned(own, 7, neighbours=False) @ HEADS.T)


def test_heads_of_layers_may_differ_in_their_width() -> None:
    """A rope that turns more than a layer's head is another layer's; what turns nothing has each width."""
    wide, narrow, none = rope(1.0), rope(0.5, 1e6), Rope(torch.empty(0), 1.0)
    half = HEADS[:, : WIDTH // 2]
    short = Observed(POSITION, 2, half, turned(narrow, POSITION, neighbours=False)[:, : WIDTH // 2])
    layers = [observed(wide), short, Observed(POSITION, 2, half, half), observed(none)]
    turns = turns_of(layers, [wide, narrow], [WIDTH, WIDTH // 2, WIDTH // 2, WIDTH], whole=True)
    assert [len(turn.rope.frequencies) for turn in turns] == [8, 4, 4, 8]
    assert torch.equal(turns[1].rope.frequencies, narrow.frequencies)
    assert [bool(turn.rope.frequencies.any()) for turn in turns] == [True, True, False, False]


def test_another_way_is_refused() -> None:
    """Such as a factor that depends on the position."""
    own = rope(1.0)
    seen = Observed(POSITION, 2, HEADS, 1.07 * turned(own, POSITION, neighbours=False))
    with pytest.raises(NotFused, match="layer 0 turns queries and keys in a way that is not known"):
        turns_of([seen], [own], [WIDTH], whole=False)
    with pytest.raises(NotFused, match="turns more than a head"):
        turns_of([seen], [own], [WIDTH // 2], whole=False)


@pytest.mark.parametrize("architecture", ["glm4", "smollm3", "exaone4", "ministral3"])
def test_models_of_16_bits_turn_as_they_are_seen_to(tmp_path: Path, architecture: str) -> None:
    """Rounding does not hide it."""
    folder = build_model(architecture, tmp_path)
    model = load_model(str(folder), dtype="bfloat16", device="cpu", threads=1).model
    assert isinstance(model, FusedDecoder)


@pytest.mark.parametrize("backend", ["auto", "onednn"])
def test_only_what_turns_is_stretched(tmp_path: Path, backend: str) -> None:
    """YaRN and norms of heads, of which a part is rotated (GLM 4.5): norms need angles for all columns."""
    config = Glm4MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        first_k_dense_replace=2,
        use_qk_norm=True,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.5,
        },
    )
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu", threads=1, cpu_backend=backend)
    assert isinstance(loaded.model, FusedDecoder)
    tokens = [(7 * index + 3) % 290 for index in range(200)]
    runner = ModelRunner(loaded, 64, 4)
    found = runner.forward([Segment(SequenceKv.open(runner.pool, []), tokens, None, range(200))])
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class _OneDevice(TorchDispatchMode):
    """Refuses what a GPU refuses: operations on tensors of its memory and of the CPU's."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """See TorchDispatchMode."""
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.ndim]
        if "index" not in function.name() and "copy" not in function.name():
            assert len({one.device for one in found}) <= 1, f"{function.name()} mixes devices"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("growth", [None, Growth(0.1, 100)])
def test_a_layer_of_a_gpu_is_observed_there(growth: Growth | None) -> None:
    """Even where queries grow with their position (the memory of a GPU is torch's `meta` here)."""
    there = {"device": "meta"}
    own = Rope(torch.empty(WIDTH // 2, **there), 1.0, growth)
    layer = Observed(POSITION, 2, torch.empty(3, WIDTH, **there), torch.empty(3, WIDTH, **there))
    with _OneDevice(), pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
        turns_of([layer], [own], [WIDTH], whole=False)
