"""Ranks together compute what one process computes."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.linear import KernelLinear
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.parallel.order import Order
from outrider.engine.parallel.shard import Shard
from outrider.engine.quantization.modules import round_linears
from outrider.engine.quantization.rounding import BITS
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests.checkpoints import write
from tests.models import ARCHITECTURES, OWN_ATTENTION, RECURRENT, build_model, plain_model
from tests.unit.engine.conftest import Pair
from tests.unit.engine.loading.test_stored import EXACT, FP8, WIDENED, plain
from tests.unit.engine.parallel.conftest import Threads, settings
from tests.unit.engine.parallel.threads import SECONDS, Table, ThreadRanks

GEMMA4 = ("gemma4", "gemma4_dense", "gemma4_moe")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
REFUSED = (*LATENT, *GEMMA4, "gemma3n", "hunyuan_moe", *OWN_ATTENTION, *RECURRENT)
STORED_JOINED = ("granite_moe",)
"""transformers cuts their experts apart as it loads them, so no rank can read its part: refused as well."""
DIVIDED = [name for name in ARCHITECTURES if name not in (*REFUSED, *STORED_JOINED)]
VOCABULARY = 300
needs_kernels = pytest.mark.skipif(vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512")


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(2, VOCABULARY) for _ in range(count)]


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32 rounding, and the same token chosen."""
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def everything(runner: ModelRunner, pair: Pair) -> None:
    """Chunks, a tree, a commit with moves, survivors, a fork and a ragged batch, against the plain model."""
    prompt, nodes, other = tokens_of(5, 18), tokens_of(6, 8), tokens_of(7, 30)
    kv = SequenceKv.open(runner.pool, prompt)
    for start, stop in ((0, 1), (1, 12), (12, 18)):
        logits = runner.forward([Segment(kv, prompt[start:stop], None, range(stop - start))])
        assert_same(logits, pair.expected(prompt)[start:stop])
        runner.commit(kv, range(stop - start), prompt[start:stop])
    runner.forward([Segment(kv, nodes, [-1, 0, 0, 1, 2, 2, 4, 5], [])])
    runner.commit(kv, [0, 2], [nodes[0], nodes[2]], survivors=[5, 7])
    logits = runner.forward([Segment(kv, [7, 9], [1, 0], [0, 1])])
    path = [*prompt, nodes[0], nodes[2], nodes[5]]
    assert_same(logits[0], pair.expected([*path, nodes[7], 7])[-1])
    assert_same(logits[1], pair.expected([*path, 9])[-1])
    runner.commit(kv, [0], [nodes[5]])
    fresh, copy = SequenceKv.open(runner.pool, other), runner.fork(kv)
    logits = runner.forward(
        [Segment(fresh, other, None, [29, 3]), Segment(kv, [40], None, [0]), Segment(copy, [41], None, [0])]
    )
    expected = pair.expected(other)
    assert_same(logits[:2], expected[[29, 3]])
    assert_same(logits[2], pair.expected([*path, 40])[-1])
    assert_same(logits[3], pair.expected([*path, 41])[-1])


def test_a_dtype_that_no_configuration_names(
    folder_of: Callable[[str], Path], tmp_path: Path, threads_of: Any
) -> None:
    """It is that of the first weight which is no integer, as in one process."""
    source = folder_of("llama")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": None, "torch_dtype": None}))
    extra = {"a_counter": torch.tensor([3]), "a_scale": torch.tensor(1.0)}
    save_file(
        extra | load_file(source / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"}
    )
    assert load_model(str(tmp_path), dtype="auto", device="cpu", threads=1).dtype == torch.float32
    assert threads_of(tmp_path, 2, dtype="auto").runner.loaded.dtype == torch.float32


@pytest.mark.parametrize("architecture", DIVIDED)
def test_two_ranks_compute_what_one_does(
    architecture: str, pair_of: Callable[..., Pair], folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Logits of every kind of step are the plain model's but for rounding."""
    threads: Threads = threads_of(folder_of(architecture), 2)
    everything(threads.runner, pair_of(architecture))
    loaded, whole = threads.runner.loaded, pair_of(architecture).loaded
    assert (loaded.vocabulary_size, loaded.context_length) == (300, 512)
    assert loaded.eos_token_ids == whole.eos_token_ids
    assert loaded.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert loaded.arithmetic == f"{whole.arithmetic} in 2 ranks"


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_features_of_every_layer_are_those_of_one_process(
    architecture: str, pair_of: Callable[..., Pair], folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Also of the output layer: then all ranks compute all rows of the last layer."""
    runner, tokens = threads_of(folder_of(architecture), 2).runner, tokens_of(5, 12)
    found, layers = [], range(runner.loaded.num_layers + 1)
    for each in (runner, ModelRunner(pair_of(architecture).loaded, 64, 4)):
        segments = [Segment(SequenceKv.open(each.pool, []), tokens, None, [11], range(3, 12))]
        logits, taken = each.forward_with_features(segments, layers)
        found.append([logits, *(taken[layer] for layer in layers)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt_neox", "olmo2", "starcoder2", "mixtral", "olmoe", "gpt_oss"]
)
def test_ranks_may_share_a_kv_head(
    architecture: str, pair_of: Callable[..., Pair], folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Four ranks of two kv heads: two ranks hold the same one."""
    everything(threads_of(folder_of(architecture), 4).runner, pair_of(architecture))


@pytest.mark.parametrize("architecture", ["gemma3", "apertus", "olmo2"])
def test_ranks_share_the_only_kv_head(architecture: str, tmp_path: Path, threads_of: Any) -> None:
    """Its norm is as wide as one over each head and as one over all: the norm of queries says which it is."""
    folder = build_model(architecture, tmp_path, num_key_value_heads=1)
    runner = threads_of(folder, 2).runner
    everything(runner, Pair(runner.loaded, plain_model(folder)))


@pytest.mark.parametrize(("hidden_size", "heads"), [(160, 4), (96, 6)])
def test_heads_that_are_a_part_of_the_hidden_width(
    hidden_size: int, heads: int, tmp_path: Path, threads_of: Any
) -> None:
    """Where no setting says how wide a head is, the small model has such heads too."""
    folder = build_model("stablelm", tmp_path, hidden_size=hidden_size, num_attention_heads=heads)
    runner = threads_of(folder, 2).runner
    everything(runner, Pair(runner.loaded, plain_model(folder)))


def test_ranks_may_have_unequal_parts_of_an_mlp(tmp_path: Path, threads_of: Any) -> None:
    """Of 98 columns two of four ranks have one more than the others."""
    folder = build_model("llama", tmp_path, intermediate_size=98)
    runner = threads_of(folder, 4).runner
    everything(runner, Pair(runner.loaded, plain_model(folder)))


@needs_kernels
@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma", "gpt2", "gpt_neox", "olmo2", "phi"])
def test_rounded_parts_are_those_of_the_rounded_whole(
    architecture: str, weights: str, folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Ranks compute what transformers does with the numbers that the codes of the whole weights stand for."""
    folder = folder_of(architecture)
    runner: ModelRunner = threads_of(folder, 2, weights=weights).runner
    whole = plain_model(folder)
    round_linears(whole, BITS[weights])
    everything(runner, Pair(runner.loaded, whole))
    kinds = [module for module in runner.loaded.model.modules() if isinstance(module, KernelLinear)]
    assert [module.dtype for module in kinds] == [torch.int8] * (3 * 4 + 1)
    assert runner.loaded.arithmetic.startswith(f"{weights} float32 fused")


@needs_kernels
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_experts_beside_rounded_parts(
    architecture: str, folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Those of experts are divided in groups, too: of three a rank has one or two."""
    folder = folder_of(architecture)
    runner: ModelRunner = threads_of(folder, 2, weights="int8").runner
    whole = plain_model(folder)
    round_linears(whole, 8)
    everything(runner, Pair(runner.loaded, whole))


@needs_kernels
def test_codes_in_four_ranks(tmp_path: Path, threads_of: Any) -> None:
    """Two of them have the same kv head, and one has a third of the MLP more than the others."""
    folder = build_model("llama", tmp_path, head_dim=32, intermediate_size=160)
    runner: ModelRunner = threads_of(folder, 4, weights="int4").runner
    whole = plain_model(folder)
    round_linears(whole, 4)
    everything(runner, Pair(runner.loaded, whole))


@needs_kernels
@pytest.mark.parametrize("name", [*EXACT, *WIDENED, *FP8])
def test_ranks_of_a_quantized_checkpoint(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path, threads_of: Any
) -> None:
    """They compute what transformers does with the numbers that the codes stand for, an output layer's too;
    layers run from codes where they do in one process."""
    settings, writer = (EXACT | WIDENED | FP8)[name]
    written = write(folder_of("llama"), tmp_path / "model", settings, writer, head=True)
    runner: ModelRunner = threads_of(written.folder, 2).runner
    everything(runner, Pair(runner.loaded, plain(folder_of("llama"), written)))
    kinds = [module for module in runner.loaded.model.modules() if isinstance(module, KernelLinear)]
    assert sum(module.dtype == torch.int8 for module in kinds) == (0 if name in WIDENED else 13)
    method = settings["quant_method"].removeprefix("fbgemm_")
    assert name in WIDENED or runner.loaded.arithmetic.startswith(f"{method} float32")


def test_ranks_with_another_size_of_groups_than_the_order_of_numbers(
    folder_of: Callable[[str], Path], tmp_path: Path, threads_of: Any
) -> None:
    """The order in the checkpoint is right, as it is in one process: without it ranks had other numbers."""
    settings, writer = EXACT["gptq"]
    written = write(folder_of("llama"), tmp_path / "model", settings | {"group_size": 64}, writer)
    runner: ModelRunner = threads_of(written.folder, 2).runner
    everything(runner, Pair(runner.loaded, plain(folder_of("llama"), written)))


@needs_kernels
@pytest.mark.parametrize("name", ["gptq", "awq", "packed, zeros", "fp8, rows"])
def test_quantized_layers_that_are_one_in_the_checkpoint(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path, threads_of: Any
) -> None:
    """Parts of several heads and of gate and up are put together again."""
    written = write(folder_of("phi3"), tmp_path / "model", *(EXACT | WIDENED | FP8)[name])
    runner: ModelRunner = threads_of(written.folder, 2).runner
    everything(runner, Pair(runner.loaded, plain(folder_of("phi3"), written)))


def test_a_vocabulary_that_ranks_do_not_share_evenly(tmp_path: Path, threads_of: Any) -> None:
    """The last rank's rows end before its part does; embeddings may be tied."""
    folder = build_model("llama", tmp_path, vocab_size=301, tie_word_embeddings=True)
    runner: ModelRunner = threads_of(folder, 2).runner
    plain = plain_model(folder)
    tokens = [*tokens_of(1, 10), 300, 0]
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, tokens, None, range(12))])
    with torch.no_grad():
        expected = plain(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.shape == (12, 301)
    assert_same(logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "olmo2"])
def test_a_token_s_bits_do_not_depend_on_its_batch(
    architecture: str, dtype: str, folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Ranks are added in one order: a token gets the same bits alone, in a chunk and beside others."""
    if vector_backend(getattr(torch, dtype)) is None:
        pytest.skip("the library's products depend on the batch")
    runner: ModelRunner = threads_of(folder_of(architecture), 2, dtype=dtype, deterministic=True).runner
    tokens = tokens_of(2, 8)
    kv = SequenceKv.open(runner.pool, [])
    chunk = runner.forward([Segment(kv, tokens, None, range(8))])
    kv.rollback()
    alone = []
    for token in tokens:
        alone.append(runner.forward([Segment(kv, [token], None, [0])])[0])
        runner.commit(kv, [0], [token])
    other = SequenceKv.open(runner.pool, [])
    again = SequenceKv.open(runner.pool, [])
    beside = runner.forward([Segment(other, [3] * 20, None, []), Segment(again, tokens, None, range(8))])
    assert torch.equal(torch.stack(alone), chunk)
    assert torch.equal(chunk, beside)


def test_experts_in_16_bits(pair_of: Callable[..., Pair], folder_of: Any, threads_of: Any) -> None:
    """Parts of sums are rounded, so a router may choose otherwise; most tokens are the plain model's."""
    runner: ModelRunner = threads_of(folder_of("mixtral"), 2, dtype="bfloat16").runner
    tokens = tokens_of(3, 40)
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, tokens, None, range(40))])
    expected = pair_of("mixtral", "bfloat16").expected(tokens)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize(
    ("architecture", "field", "value", "name"),
    [
        ("llama", "num_key_value_heads", 4, "model.layers.0.self_attn.k_proj.weight"),
        ("llama", "vocab_size", 310, "lm_head.weight"),
        ("llama", "vocab_size", 290, "lm_head.weight"),
        ("mixtral", "intermediate_size", 64, "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
    ],
)
def test_a_configuration_with_other_shapes_than_the_weights(
    architecture: str, field: str, value: int, name: str, folder_of: Any, tmp_path: Path
) -> None:
    """It is refused: slices of such weights, filled up with zeros, would fit."""
    folder = Path(shutil.copytree(folder_of(architecture), tmp_path / "model"))
    refuses_shape(folder, field, value, name)


def test_a_quantized_checkpoint_of_another_vocabulary(folder_of: Any, tmp_path: Path) -> None:
    """It is refused too: its embedding and output layer are not quantized."""
    settings, writer = EXACT["gptq"]
    written = write(folder_of("llama"), tmp_path / "model", settings, writer)
    refuses_shape(written.folder, "vocab_size", 310, "lm_head.weight")


@pytest.mark.parametrize("name", ["gptq", "packed", "int8, rows", "fp8, blocks"])
def test_a_quantized_layer_of_another_width(name: str, folder_of: Any, tmp_path: Path) -> None:
    """It is named before anything is loaded, with what to change."""
    written = write(folder_of("llama"), tmp_path / "model", *(EXACT | FP8)[name])
    said = json.loads((written.folder / "config.json").read_text())
    (written.folder / "config.json").write_text(json.dumps(said | {"intermediate_size": 192}))
    order = Order(config=settings(written.folder, 2), rank=0, meeting="", seconds=SECONDS)
    layer = r"model\.layers\.0\.mlp\.down_proj\.\w+ has \d+ entries for the 192 numbers of the config\.json"
    with pytest.raises(ModelError, match=rf"{layer}.*use the config\.json that belongs to the weights"):
        Shard(order, lambda _: None)


def refuses_shape(folder: Path, field: str, value: int, name: str) -> None:
    """With another value in its configuration a model is refused, and this weight is named."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {field: value}))
    shard = Shard(Order(config=settings(folder, 2), rank=0, meeting="", seconds=SECONDS), lambda _: None)
    with pytest.raises(ModelError, match=rf"has a {re.escape(name)} of .*; use the config.json that belongs"):
        shard.whole(ThreadRanks(Table(1), 0))


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_architectures_are_refused(
    architecture: str, folder_of: Callable[[str], Path], threads_of: Any
) -> None:
    """Only fused decoders are divided; the sentence names what is not of these."""
    with pytest.raises(ModelError, match=r"cannot be divided between ranks \(.*set tensor_parallel to 1"):
        threads_of(folder_of(architecture), 1)


@pytest.mark.parametrize(
    ("name", "architecture", "ranks", "layer"),
    [("awq", "llama", 4, "self_attn.o_proj"), ("fp8, blocks", "phi3", 2, "self_attn.qkv_proj")],
)
def test_groups_that_would_be_cut(
    name: str, architecture: str, ranks: int, layer: str, folder_of: Any, tmp_path: Path, threads_of: Any
) -> None:
    """Heads are not divided, and may be fewer numbers than have one scale."""
    written = write(folder_of(architecture), tmp_path / "model", *(EXACT | WIDENED | FP8)[name])
    said = rf"{ranks} ranks would cut groups of 32 numbers of model.layers.0.{layer}; set another number"
    with pytest.raises(ModelError, match=said):
        threads_of(written.folder, ranks)


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 3, "3 ranks cannot share the 4 query heads"),
        ({"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}, 6, "the 4 kv heads"),
        ({"intermediate_size": 3}, 4, "the 3 columns of the MLP; set"),
        ({"weights": "int8", "intermediate_size": 32}, 2, "the 32 columns of the MLP in steps of 32"),
        ({"weights": "int8"}, 4, "would cut groups of 32 numbers of self_attn.o_proj"),
    ],
)
def test_ranks_that_do_not_divide_the_model(
    changes: dict[str, Any], ranks: int, said: str, tmp_path: Path, threads_of: Any
) -> None:
    """The sentence names what cannot be shared."""
    sizes = {name: size for name, size in changes.items() if name != "weights"}
    folder = build_model("llama", tmp_path, **sizes)
    with pytest.raises(ModelError, match=said):
        threads_of(folder, ranks, weights=changes.get("weights", "full"))
