"""`deterministic` on the kernels of GPUs, through Triton's interpreter: tiny models in all ways of computing.

Equal bits here are necessary. On a device they rest on what `docs/exactness.md` says besides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.gpu import attention, ordered_plan, runner
from outrider.engine.gpu.coded_linear import CodedLinear
from outrider.engine.gpu.ordered_linear import OrderedLinear
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import check_determinism, loader
from outrider.engine.loading.code_weights import code_weights
from outrider.engine.quantization.rounding import BITS
from outrider.protocol.errors import ModelError
from tests.models import build_model
from tests.unit.engine.gpu.architectures import LAYERS
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.gpu.test_coded_models import code_some, loaded_of, network_of, rounded_model
from tests.unit.engine.gpu.test_one_row import few_programs
from tests.unit.engine.reading import VOCABULARY, Target, read_all, token_by_token

LENGTH, CHUNK = 40, 28
PAGES = 100
BUCKETS = (1, 4, 12)
GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of the tests have two splits, and steps little padding: interpreting takes time."""
    shrink(monkeypatch)
    few_programs(monkeypatch)
    monkeypatch.setattr(check_determinism, "CONTEXT", CHUNK)
    monkeypatch.setattr(check_determinism, "LENGTH", 8)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Blocks and splits of 32 entries, and steps without padding."""
    patch.setattr(attention, "BLOCK_KEYS", 32)
    patch.setattr(ordered_plan, "SPLIT", 32)
    patch.setattr(runner, "EAGER_MULTIPLE", 1)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny model by architecture."""

    @cache
    def build(architecture: str) -> Path:
        layers, place = LAYERS.get(architecture, 1), tmp_path_factory.mktemp(architecture)
        return build_model(architecture, place, num_hidden_layers=layers)

    return build


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    """The folder of a smaller Llama."""
    return build_model("llama", tmp_path_factory.mktemp("one"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def small(one_layer) -> LoadedModel:
    """The same, put in order."""
    return in_order(one_layer)


def plainly_loaded(folder: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    """A model with the linear layers of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "pack_linears", lambda *_: 0)
        return loader.load_model(str(folder), dtype=dtype, device="cpu", threads=1, **options)


def in_order(folder: Path, dtype: str = "float32") -> LoadedModel:
    """A model as a GPU has it with `deterministic`, without the checks at load."""
    return loader._in_order(replace(plainly_loaded(folder, dtype), kernels=True))


def target_of(loaded: LoadedModel) -> Target:
    """A text over the edge of a split and one that begins alike; their last tokens one by one."""
    generator = random.Random(1)
    text, other = ([generator.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(2))
    texts = [text, text[:12] + other[:6]]
    eager = GraphRunner(loaded, PAGES, 4, buckets=())
    return Target(loaded, texts, [token_by_token(eager, each, min(CHUNK, len(each) - 6)) for each in texts])


OTHERS = (
    *("llama", "mixtral", "mistral", "gpt_neox", "qwen3", "qwen3_moe", "gpt_oss"),
    *("gemma2", "olmo2", "phi"),
)
MIXED = ("gemma4", "gemma4_dense")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, *MIXED)]


@pytest.mark.parametrize("architecture", ["gpt2", *SLOW])
def test_any_way_of_computing_gives_the_same_bits(folder_of, architecture):
    """Chunks, trees, batches, graphs and reused prefixes against one token at a time."""
    loaded, graphs = in_order(folder_of(architecture)), FakeGraphs()
    read_all(target_of(loaded), GraphRunner(loaded, PAGES, 4, buckets=BUCKETS, graphs=graphs), 0)
    assert graphs.replayed > 2


def test_bfloat16_with_other_pages(one_layer):
    """As models on GPUs are."""
    loaded = in_order(one_layer, "bfloat16")
    read_all(target_of(loaded), GraphRunner(loaded, PAGES, 7, buckets=()), 1)


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_any_way_of_computing_gives_the_same_bits_with_codes(one_layer, weights):
    """Rows of steps of any size go through tiles of either height."""
    loaded, _ = rounded_model(one_layer, weights)
    assert sum(isinstance(module, CodedLinear) for module in loaded.model.modules()) == 4 + 1
    loaded = loader._in_order(replace(loaded, kernels=True, weights=weights))
    read_all(target_of(loaded), GraphRunner(loaded, PAGES, 4, buckets=BUCKETS, graphs=FakeGraphs()), 0)


def on_kernels(patch: pytest.MonkeyPatch) -> None:
    """Models are loaded as on a GPU."""
    patch.setattr(loader, "_with_kernels", lambda loaded, say: replace(loaded, kernels=True))
    patch.setattr(loader, "place_weights", _codes_in_place)


def _codes_in_place(model, network, place, weights, say) -> None:
    if weights in BITS:
        code_weights(network, place, BITS[weights], say)


def test_a_model_is_loaded_in_order_and_checked(one_layer, monkeypatch):
    """All its linear layers are replaced; what it computes is what the model computes."""
    on_kernels(monkeypatch)
    said: list[str] = []
    loaded = plainly_loaded(one_layer, deterministic=True, say=said.append)
    assert loaded.ordered
    assert isinstance(loaded.model, FusedDecoder)
    assert sum(isinstance(module, OrderedLinear) for module in loaded.model.modules()) == 4 + 1
    assert not any(type(module) is torch.nn.Linear for module in loaded.model.modules())
    assert said[-1] == "checking that a token's bits do not depend on its batch"


def test_a_model_of_codes_is_loaded_in_order_and_checked(one_layer, monkeypatch):
    """Its layers keep their codes."""
    on_kernels(monkeypatch)
    loaded = plainly_loaded(one_layer, deterministic=True, weights="int8")
    assert sum(isinstance(module, CodedLinear) for module in loaded.model.modules()) == 4 + 1
    assert (loaded.ordered, loaded.weights) == (True, "int8")
    assert check_determinism.library_part(replace(loaded, device=GPU)) is None


def test_the_check_at_load_sees_tiles_of_both_heights(one_layer, monkeypatch):
    """If those of more than 16 rows added up in another order, it would show."""
    loaded, _ = rounded_model(one_layer, "int8")
    loaded = loader._in_order(replace(loaded, kernels=True, weights="int8"))
    product = CodedLinear.forward

    def otherwise_in_high_tiles(self, x):
        return product(self, x) * (1.0 + 1e-5 * (len(x) > 16))

    monkeypatch.setattr(CodedLinear, "forward", otherwise_in_high_tiles)
    with pytest.raises(ModelError, match="LlamaForCausalLM in float32 computes other bits for a token"):
        check_determinism.check_determinism(loaded)


def test_layers_without_codes_beside_those_that_have_some_are_put_in_order(one_layer):
    """Queries have codes, keys and values none: each is a product of its own."""
    network = network_of(one_layer)
    code_some(network, "q_proj", 8)
    loaded, _ = loaded_of(network)
    loaded = loader._in_order(replace(loaded, kernels=True, weights="gptq"))
    kinds = [type(part) for part in loaded.model.stack[0].qkv.parts]
    assert kinds == [CodedLinear, OrderedLinear, OrderedLinear]
    assert check_determinism.library_part(replace(loaded, device=GPU)) is None


def test_the_check_at_load_refuses_other_bits(small, monkeypatch):
    """A product whose results depend on how many rows there are is found out."""
    product = OrderedLinear.forward
    monkeypatch.setattr(OrderedLinear, "forward", lambda self, x: product(self, x) * (1.0 + 1e-5 * len(x)))
    with pytest.raises(ModelError, match="LlamaForCausalLM in float32 computes other bits for a token"):
        check_determinism.check_determinism(small)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"kernels": False, "ordered": False}, "a float32 model on cuda:0"),
        ({"ordered": False, "model": torch.nn.Linear(1, 1)}, "Linear on cuda:0"),
        ({"ordered": False, "ranks": 2}, "a model in 2 ranks on cuda:0"),
    ],
)
def test_what_has_no_such_kernels_is_refused(small, changes, part):
    """Plain torch, a model's own modules and several ranks; the sentence names it."""
    loaded = replace(small, device=GPU, **changes)
    with pytest.raises(ModelError, match=f"^deterministic: {part} is computed by the library's kernels"):
        check_determinism.refuse_library(loaded)


@pytest.mark.parametrize(
    ("architecture", "changes", "part"),
    [
        ("mixtral", {"hidden_act": "quick_gelu"}, "the experts of MixtralForCausalLM"),
        ("gpt2", {"activation_function": "quick_gelu"}, "the activation of GPT2LMHeadModel"),
    ],
)
def test_parts_that_torch_computes_are_refused(tmp_path, architecture, changes, part):
    """What attention does with sinks and softcap would be in order."""
    folder = build_model(architecture, tmp_path, num_hidden_layers=2, **changes)
    assert check_determinism.library_part(replace(in_order(folder), device=GPU)) == part


def test_kernels_that_do_not_fit_are_said(one_layer, monkeypatch):
    """Nothing else takes their place."""
    from triton.runtime.errors import OutOfResources

    def misfit(loaded: LoadedModel) -> None:
        raise OutOfResources(300, 200, "shared memory")

    on_kernels(monkeypatch)
    monkeypatch.setattr(loader, "check_paged", lambda *_: None)  # it takes long, and passes
    monkeypatch.setattr(loader, "check_determinism", misfit)
    with pytest.raises(ModelError, match=r"^deterministic: kernels for it do not fit cpu \(out of resource"):
        plainly_loaded(one_layer, deterministic=True)
