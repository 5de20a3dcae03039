"""A rank reads its slices of a checkpoint and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from outrider.engine.fused_decoder.shares import Share, shares_of
from outrider.engine.loading.open_weights import InMemory, OpenWeights
from outrider.engine.parallel.cuts import Cut, Cuts
from outrider.engine.parallel.weights import network_of, part_of, parts_of
from outrider.protocol.errors import ModelError
from tests.models import ARCHITECTURES, build_model


class Counted:
    """A weight that counts the numbers that were read of it."""

    def __init__(self, weight: Any) -> None:
        self._weight, self.read = weight, 0

    def get_shape(self) -> list[int]:
        """The weight's."""
        return list(self._weight.get_shape())

    def __getitem__(self, place: Any) -> torch.Tensor:
        found: torch.Tensor = self._weight[place]
        self.read += found.numel()
        return found


def load(folder: Path, rank: int, ranks: int) -> tuple[Any, dict[str, Counted]]:
    """A rank's network, and what was read for it."""
    config = AutoConfig.from_pretrained(folder)
    with OpenWeights(str(folder)) as checkpoint:
        counted = {name: Counted(weight) for name, weight in checkpoint.weights.items()}
        cuts = Cuts(shares(folder), rank, ranks)
        kind = getattr(transformers, config.architectures[0])
        made = network_of(kind, config, parts_of(counted, cuts), cuts, torch.float32)
    return made, counted


def shares(folder: Path) -> dict[str, Share]:
    """Of a model, found without its weights."""
    with torch.device("meta"):
        return shares_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_its_part_alone(ranks: int, folder_of: Callable[[str], Path]) -> None:
    """Of matrices a rank reads one part of as many as there are ranks, or of the kv heads; of norms all."""
    made, counted = load(folder_of("llama"), ranks - 1, ranks)
    for name, weight in counted.items():
        whole = torch.Size(weight.get_shape()).numel()
        parts = 1 if "norm" in name else min(ranks, 2) if "k_proj" in name or "v_proj" in name else ranks
        assert weight.read == whole // parts, name
        assert made.get_parameter(name).numel() == weight.read, name


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_each_rank_reads_its_part_of_every_expert(
    architecture: str, folder_of: Callable[[str], Path]
) -> None:
    """Whether a checkpoint has them apart or stacked, the parts are those of the stacked weights."""
    folder = folder_of(architecture)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    (first, counted), (second, _) = (load(folder, rank, 2) for rank in range(2))
    for name, weight in counted.items():
        if ".experts." in name:
            share = 1 if name.endswith("down_proj_bias") else 2
            assert weight.read == torch.Size(weight.get_shape()).numel() // share, name
    experts = [name for name, _ in whole.named_parameters() if ".experts." in name]
    assert len(experts) >= 2
    for name in experts:
        given, *parts = (one.get_parameter(name) for one in (whole, first, second))
        assert given.numel() == sum(part.numel() for part in parts) or name.endswith("down_proj_bias")
        assert all(contains(given, part) for part in parts), name


def contains(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Every number of the part stands in the same expert of the whole; or the part is zeros."""
    same = [bool(torch.isin(ours, all_of).all()) for ours, all_of in zip(part, whole, strict=True)]
    return all(same) or not bool(part.any())


def test_the_parts_of_all_ranks_are_the_whole(folder_of: Callable[[str], Path]) -> None:
    """Side by side the parts are the checkpoint's weights."""
    folder = folder_of("llama")
    whole = LlamaForCausalLM.from_pretrained(folder)
    made = [load(folder, rank, 2)[0] for rank in range(2)]
    for name, axis in (("q_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        full = f"model.layers.1.self_attn.{name}.weight"
        parts = torch.cat([one.get_parameter(full) for one in made], axis)
        assert torch.equal(parts, whole.get_parameter(full))
    for full, axis in (("model.layers.2.mlp.down_proj.weight", 1), ("lm_head.weight", 0)):
        parts = torch.cat([one.get_parameter(full) for one in made], axis)
        assert torch.equal(parts, whole.get_parameter(full))


def test_a_checkpoint_of_several_files(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    """An index says which there are."""
    folder = build_model("llama", tmp_path)
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert (folder / "model.safetensors.index.json").exists()
    made, _ = load(folder, 1, 2)
    expected, _ = load(folder_of("llama"), 1, 2)
    for name, weight in made.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), name


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    """The sentence says what is missing."""
    folder = build_model("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights in safetensors"):
        OpenWeights(str(folder))


def test_missing_weights_are_named(folder_of: Callable[[str], Path]) -> None:
    """One of them, and how many there are."""
    config = AutoConfig.from_pretrained(folder_of("llama"))
    cuts = Cuts(shares(folder_of("llama")), 0, 2)
    with OpenWeights(str(folder_of("llama"))) as checkpoint:
        left = {name: one for name, one in checkpoint.weights.items() if "layers.0.mlp.down" not in name}
        with pytest.raises(ModelError, match=r"1 weights .* such as model.layers.0.mlp.down_proj.weight"):
            network_of(LlamaForCausalLM, config, parts_of(left, cuts), cuts, torch.float32)


def test_weights_of_other_shapes_are_named(folder_of: Callable[[str], Path]) -> None:
    """A checkpoint that does not fit its configuration."""
    config = AutoConfig.from_pretrained(folder_of("llama"))
    cuts = Cuts(shares(folder_of("llama")), 0, 2)
    with OpenWeights(str(folder_of("llama"))) as checkpoint:
        odd: Any = checkpoint.weights | {"model.norm.weight": InMemory(torch.ones(7))}
        with pytest.raises(
            ModelError, match=r"1 weights .* such as model.norm.weight, are missing or cannot"
        ):
            network_of(LlamaForCausalLM, config, parts_of(odd, cuts), cuts, torch.float32)


@pytest.fixture(scope="module")
def eight_heads() -> Callable[[str], dict[str, Share]]:
    """The shares of a kind with 8 heads of 4 numbers, of them 2 kv heads where it has fewer; 12 columns of
    the MLP and 10 words."""

    def made(kind: str) -> dict[str, Share]:
        changes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 8, "vocab_size": 10}
        changes |= {"n_inner": 12} if kind == "gpt2" else {"intermediate_size": 12, "head_dim": 4}
        config = ARCHITECTURES[kind](bos_token_id=0, eos_token_id=1, pad_token_id=1)
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return shares_of(AutoModelForCausalLM.from_config(config))[1]

    return made


@pytest.mark.parametrize(
    ("kind", "name", "shape", "rank", "expected"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", [32, 5], 1, Cut(0, ((8, 16),), 8)),
        ("llama", "model.layers.0.self_attn.k_proj.bias", [8], 1, Cut(0, ((0, 4),), 4)),
        ("llama", "model.layers.0.self_attn.v_proj.weight", [8, 5], 2, Cut(0, ((4, 8),), 4)),
        ("llama", "model.layers.0.self_attn.o_proj.weight", [5, 32], 3, Cut(1, ((24, 32),), 8)),
        ("llama", "model.layers.0.self_attn.o_proj.bias", [5], 0, None),
        ("llama", "model.layers.0.self_attn.o_proj.bias", [5], 3, Cut(0, (), 5)),
        ("llama", "model.layers.0.mlp.up_proj.weight", [12, 5], 1, Cut(0, ((3, 6),), 3)),
        ("llama", "model.layers.0.mlp.down_proj.weight", [5, 12], 1, Cut(1, ((3, 6),), 3)),
        ("llama", "model.embed_tokens.weight", [10, 5], 2, Cut(0, ((6, 9),), 3)),
        ("llama", "lm_head.weight", [10, 5], 3, Cut(0, ((9, 10),), 3)),
        ("llama", "model.norm.weight", [5], 3, None),
        (
            "phi3",
            "layers.0.self_attn.qkv_proj.weight",
            [48, 5],
            3,
            Cut(0, ((24, 32), (36, 40), (44, 48)), 16),
        ),
        ("phi3", "layers.0.mlp.gate_up_proj.weight", [24, 5], 1, Cut(0, ((3, 6), (15, 18)), 6)),
        ("gpt_neox", "layers.0.attention.query_key_value.bias", [96], 1, Cut(0, ((24, 48),), 24)),
        ("gpt_neox", "embed_out.weight", [10, 5], 2, Cut(0, ((6, 9),), 3)),
        ("gpt2", "h.0.attn.c_attn.weight", [5, 96], 1, Cut(1, ((8, 16), (40, 48), (72, 80)), 24)),
        ("gpt2", "h.0.attn.c_attn.bias", [96], 1, Cut(0, ((8, 16), (40, 48), (72, 80)), 24)),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", [32, 5], 1, Cut(0, ((8, 16),), 8)),
        ("gpt2", "transformer.h.0.mlp.c_proj.weight", [12, 5], 1, Cut(0, ((3, 6),), 3)),
        ("gpt2", "transformer.wpe.weight", [512, 5], 1, None),
        ("olmo2", "model.layers.0.self_attn.k_norm.weight", [8], 3, Cut(0, ((4, 8),), 4)),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight", [4], 3, None),
        ("phi", "model.layers.0.mlp.fc2.bias", [5], 1, Cut(0, (), 5)),
    ],
)
def test_what_four_ranks_have(
    kind: str,
    name: str,
    shape: list[int],
    rank: int,
    expected: Cut | None,
    eight_heads: Callable[[str], dict[str, Share]],
) -> None:
    """Heads, columns of the MLP and words are shared, output biases are rank 0's, norms and positions
    everybody's; names may lack their beginning."""
    assert Cuts(eight_heads(kind), rank, 4).cut(name, shape) == expected


def test_columns_are_shared_in_steps(eight_heads: Callable[[str], dict[str, Share]]) -> None:
    """As evenly as steps of 5 allow: of 12 columns the first rank has one step, the last one what is left."""
    cuts = [Cuts(eight_heads("llama"), rank, 2, step=5) for rank in range(2)]
    name, head = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
    assert [one.cut(name, [12, 5]) for one in cuts] == [Cut(0, ((0, 5),), 5), Cut(0, ((5, 12),), 7)]
    assert [one.cut(head, [10, 5]) for one in cuts] == [Cut(0, ((0, 5),), 5), Cut(0, ((5, 10),), 5)]


def test_behind_the_last_word_are_zeros(eight_heads: Callable[[str], dict[str, Share]]) -> None:
    """A part has as many rows as every other."""
    weight, shares = InMemory(torch.arange(20.0).view(10, 2)), eight_heads("llama")
    cut = Cuts(shares, 3, 4).cut("lm_head.weight", [10, 2])
    assert part_of(weight, cut).tolist() == [[18.0, 19.0], [0.0, 0.0], [0.0, 0.0]]
    bias = Cuts(shares, 1, 4).cut("model.layers.0.self_attn.o_proj.bias", [2])
    assert part_of(InMemory(torch.ones(2)), bias).tolist() == [0.0, 0.0]
