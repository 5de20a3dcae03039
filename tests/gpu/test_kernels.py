"""Kernels on the device against the reference on the same device, and the CPU's bits."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.loaded_model import Geometry
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import choose, rank
from outrider.sampling.history import History
from outrider.sampling.noise import gumbel_rows, row_keys
from outrider.sampling.processors import SamplingRow
from tests.gpu.cases import Case, chain, tree

VOCABULARY = 128256


@pytest.mark.parametrize("committed", [0, 17, 300, 5000])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 20.0}])
def test_attention_is_that_of_the_reference(device, committed, options):
    """Trees and chains of one step over short and long contexts, in bf16."""
    case = Case(Geometry(1, 32, 8, 128, 128), device)
    segments = [tree(case.sequence(committed), 33), chain(case.sequence(committed), 1)]
    found, expected = case.attend(segments, **options)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("committed", [17, 1000])
def test_attention_of_the_widest_heads_is_that_of_the_reference(device, committed, width):
    """Which are read in blocks of their own."""
    case = Case(Geometry(1, 16, 8, width, width), device)
    found, expected = case.attend([tree(case.sequence(committed), 33), chain(case.sequence(committed), 1)])
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("count", [0, 1, 64])
def test_moves_read_all_before_they_write(device, count):
    """Each entry goes where the next one was, in all layers; nothing else changes."""
    from outrider.engine.gpu.attention import KernelAttention
    from outrider.engine.gpu.layout import BufferLayout
    from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles

    kernel = KernelAttention(Geometry(32, 32, 8, 128, 128), 4096, 16, torch.bfloat16, device)
    for entries in kernel.stores():
        entries.normal_()
    expected = [entries.clone() for entries in kernel.stores()]
    order = torch.randperm(4096)[:count]
    for entries in expected:
        entries[:, order.roll(1)] = entries[:, order]
    settings = PlanSettings(4, 16, kernel.trash, items=1)
    layout = BufferLayout(graph_capacity(1, settings))
    moves = list(zip(order.tolist(), order.roll(1).tolist(), strict=True))
    words = torch.from_numpy(fill(plan_tiles([], 1, settings), layout, [], moves, settings))
    kernel.move_in_step(kernel.open_step(words.to(device), layout, 1))
    assert all(torch.equal(*pair) for pair in zip(kernel.stores(), expected, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_codes_are_those_with_the_numbers(device, bits, dtype):
    """In float64, rounded once; a row has the same bits alone and in any batch."""
    from outrider.engine.gpu.coded_product import coded_product
    from outrider.engine.quantization.planes import in_planes
    from outrider.engine.quantization.rounding import rounded

    weight = rounded(torch.randn(4096, 1000), bits)
    planes, x = in_planes(weight, device), torch.randn(600, 1000).to(dtype)
    found = coded_product(x.to(device), planes, None)
    exact = x.double() @ weight.values().double().T
    assert float((found.cpu().double() - exact).norm() / exact.norm()) < 4e-3
    for rows in (1, 16, 17, 33, 64):
        assert torch.equal(coded_product(x[:rows].to(device), planes, None), found[:rows])


def test_codes_are_rounded_on_a_device_as_on_the_cpu(device):
    """Bit by bit."""
    from outrider.engine.quantization.planes import rounded_in_planes

    weight = torch.randn(300, 500).bfloat16()
    for bits in (4, 8):
        ours, theirs = (rounded_in_planes(weight, bits, place) for place in (device, torch.device("cpu")))
        assert torch.equal(ours.words.cpu(), theirs.words)
        assert torch.equal(ours.scales.cpu(), theirs.scales)


def test_noise_has_the_bits_of_the_cpu(device):
    """A whole vocabulary's noise, for seeds at the ends of the range."""
    from outrider.sampling import on_device

    tokens = torch.arange(VOCABULARY).repeat(3, 1)
    keys = row_keys([0, 2**63, 2**64 - 1], [0, 999, 10**6])
    zeros = torch.zeros(tokens.shape, device=device)
    ones = torch.ones(3, dtype=torch.float64, device=device)
    _, noise = on_device.score(tokens.to(device), zeros, ones, keys.to(device))
    assert torch.equal(noise.cpu(), gumbel_rows(keys, tokens))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.0, seed=4, top_k=50),
        SamplingParams(temperature=0.8, seed=5, min_p=0.05),
    ],
)
def test_tokens_are_those_of_the_cpu(device, params):
    """Chosen tokens, and the first one of each ranking."""
    logits = torch.randn((16, VOCABULARY), generator=torch.Generator().manual_seed(1)) * 3
    rows = [SamplingRow(params, 40 + index, index, History([])) for index in range(16)]
    assert choose(logits.to(device), rows, ()) == choose(logits, rows, ())
    found, expected = (rank(part, rows, 8, 1.0, ()) for part in (logits.to(device), logits))
    assert [ranking.tokens[0] for ranking in found] == [ranking.tokens[0] for ranking in expected]


def test_choosing_waits_once(device):
    """Nothing but the read of the tokens makes the host wait for the device."""
    logits = torch.randn((8, VOCABULARY), device=device)
    params = SamplingParams(temperature=0.7, seed=3)
    rows = [SamplingRow(params, 40 + index, index, History([])) for index in range(8)]
    choose(logits, rows, ())
    from outrider.sampling import on_device

    torch.cuda.set_sync_debug_mode("error")
    try:
        on_device.chosen(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
