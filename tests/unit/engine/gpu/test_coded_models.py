"""Models with coded weights on the kernels, through Triton's interpreter, against transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from outrider.engine.fused_decoder import FusedDecoder, fused_decoder
from outrider.engine.gpu import coded_linear
from outrider.engine.gpu.coded_linear import CodedLinear, SideBySide, compute_from_codes
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading import stored
from outrider.engine.loading.check_forward import check_paged, run_plain
from outrider.engine.loading.code_weights import code_weights
from outrider.engine.loading.loader import described
from outrider.engine.quantization.rounding import BITS, rounded
from outrider.engine.runner import ModelRunner, Segment
from tests.checkpoints import write
from tests.models import build_model, plain_model
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.gpu.test_runner import script
from tests.unit.engine.loading.test_rounded import TOKENS, expected
from tests.unit.engine.loading.test_stored import FP8, plain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGES, PAGE = 48, 4


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a tiny model of one layer by architecture."""

    @cache
    def build(architecture):
        return build_model(architecture, tmp_path_factory.mktemp(architecture), num_hidden_layers=1)

    return build


def network_of(folder, dtype=torch.float32):
    """As transformers loads it."""
    return plain_model(folder, dtype).requires_grad_(False)


def loaded_of(network, *, fused=True):
    """A model as a GPU has it, and what it computes by itself."""
    plain = run_plain(network, 512)
    shape = {"context_length": 512, "geometry": plain.geometry}
    vocabulary = plain.logits.shape[-1]
    loaded = described(network, "tiny", vocabulary, model=network, device=CPU, **shape)
    if fused:
        loaded = replace(loaded, model=fused_decoder(network, plain.geometry, plain.windows, plain.observed))
    return loaded, plain


def rounded_model(folder, weights, dtype=torch.float32, *, fused=True):
    """The same with rounded weights."""
    network = network_of(folder, dtype)
    code_weights(network, CPU, BITS[weights], lambda _: None)
    return loaded_of(network, fused=fused)


def logits(runner):
    """[T, V] of TOKENS."""
    kv = SequenceKv.open(runner.pool, [])
    return runner.forward([Segment(kv, TOKENS, None, range(len(TOKENS)))])


def assert_near(found, wanted, most=2e-3):
    """Relative to how logits spread."""
    assert torch.allclose(found, wanted, atol=most * wanted.std().item()), (found - wanted).abs().max()


FUSED = {"llama": True, "qwen2": True, "phi3": True, "gpt_neox": True, "gpt2": True, "phi": False}
FEWEST_BITS = "int4"


@pytest.mark.parametrize(
    ("architecture", "fused", "weights"),
    [
        pytest.param(
            *each, weights, marks=() if weights == FEWEST_BITS or each[0] == "llama" else pytest.mark.slow
        )
        for each in FUSED.items()
        for weights in BITS
    ],
)
def test_a_model_is_transformers_with_rounded_weights(folder_of, architecture, fused, weights):
    """Fused, with biases, with parts that are one layer already, with rows in another order, with transposed
    weights, and with modules of its own.
    """
    folder = folder_of(architecture)
    loaded, _ = rounded_model(folder, weights, fused=fused)
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=())
    assert_near(logits(runner), expected(folder, BITS[weights], experts=False))


@pytest.mark.parametrize("name", FP8)
def test_a_model_of_e4m3_is_transformers_with_its_numbers(folder_of, tmp_path, name, monkeypatch):
    """Scales of rows, of blocks and of a whole weight; no layer holds numbers."""
    monkeypatch.setattr(stored, "without_codes", lambda dtype, place: None)
    written = write(folder_of("llama"), tmp_path / "model", *FP8[name])
    network, _, _ = stored.read_quantized(str(written.folder), "float32", CUDA, False, lambda _: None)
    assert code_weights(network, CPU, None, lambda _: None) == len(written.numbers)
    loaded, _ = loaded_of(network.eval().requires_grad_(False))
    assert all(layer.qkv.planes.e4m3 for layer in loaded.model.stack)
    found = logits(GraphRunner(loaded, PAGES, PAGE, buckets=()))
    with torch.inference_mode():
        theirs = plain(folder_of("llama"), written)(torch.tensor([TOKENS])).logits[0]
    assert_near(found, theirs)


def test_every_step_of_a_script_is_the_plain_runner_s(tmp_path):
    """Chunks, a tree, commits, a fork and a batch, with graphs, against numbers that layers make."""
    loaded, _ = rounded_model(build_model("llama", tmp_path, num_hidden_layers=1), "int4")
    found = script(GraphRunner(loaded, PAGES, PAGE, buckets=(4, 8), graphs=FakeGraphs()))
    compute_from_codes(loaded.model, False)
    for ours, theirs in zip(found, script(ModelRunner(loaded, PAGES, PAGE)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", BITS)
def test_a_model_in_16_bits_passes_the_check_at_load(folder_of, weights, monkeypatch):
    """Which compares it with transformers' modules, whose numbers are rounded to 16 bits."""
    loaded, plain = rounded_model(folder_of("llama"), weights, torch.bfloat16)
    runner = partial(GraphRunner, buckets=())
    monkeypatch.setattr("outrider.engine.loading.check_forward.make_runner", runner)
    check_paged(loaded, plain, 2.0)
    assert all(layer.product is not None for layer in coded(loaded.model))


def test_parts_of_other_bits_lie_side_by_side(folder_of):
    """Queries have 8 bits, keys and values 4: each is a product of its own, and its codes are kept."""
    wanted, network = network_of(folder_of("llama")), network_of(folder_of("llama"))
    code_some(network, "q_proj", 8)
    code_some(network, "k_proj", 4)
    for name, layer in wanted.named_modules():
        bits = {"q_proj": 8, "k_proj": 4}.get(name.rpartition(".")[2])
        if bits:
            layer.weight.copy_(rounded(layer.weight, bits).values())
    loaded, _ = loaded_of(network)
    assert isinstance(loaded.model, FusedDecoder)
    assert all(isinstance(layer.qkv, SideBySide) for layer in loaded.model.stack)
    with torch.inference_mode():
        theirs = wanted(torch.tensor([TOKENS])).logits[0]
    assert_near(logits(GraphRunner(loaded, PAGES, PAGE, buckets=())), theirs)


def test_a_kernel_that_fails_leaves_the_codes_to_torch(folder_of, monkeypatch):
    """The runner without kernels computes with numbers that layers make."""
    loaded, _ = rounded_model(folder_of("llama"), "int8")
    kept = logits(GraphRunner(loaded, PAGES, PAGE, buckets=()))
    monkeypatch.setattr(coded_linear, "_kernel", lambda: pytest.fail("no kernel is wanted"))
    compute_from_codes(loaded.model, False)
    assert_near(logits(ModelRunner(loaded, PAGES, PAGE)), kept)


def code_some(network, ending, bits):
    """Round the layers whose names end so."""
    from outrider.engine.loading.code_weights import _replace
    from outrider.engine.quantization.planes import rounded_in_planes

    for name in [name for name, _ in network.named_modules() if name.endswith(ending)]:
        weight = network.get_submodule(name).weight
        _replace(network, name, rounded_in_planes(weight, bits, CPU), CPU)


def coded(model):
    """Its layers with codes."""
    return [layer for layer in model.modules() if isinstance(layer, CodedLinear)]
