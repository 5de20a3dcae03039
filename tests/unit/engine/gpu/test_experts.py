"""Products of chosen experts, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from outrider.engine.fused_decoder.decoder import BoundedGate, ExpertLinears, Experts, Router
from outrider.engine.gpu import experts as launches
from outrider.engine.gpu.experts import arranged, bounded, choose, expert_product, expert_sum

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 40, 33


def linears(columns: int, numbers: int, dtype: torch.dtype, *, turned: bool, bias: bool) -> ExpertLinears:
    """Random ones; stored as [E, in, out] if turned."""
    weight = torch.randn((EXPERTS, columns, numbers), dtype=dtype)
    if turned:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return ExpertLinears(weight, torch.randn((EXPERTS, columns), dtype=dtype) if bias else None)


def mixture(dtype: torch.dtype = torch.float32, *, turned: bool = False, bias: bool = False) -> Experts:
    """Random experts, of which each row goes through two."""
    torch.manual_seed(0)
    kind = {"turned": turned, "bias": bias}
    return Experts(
        Router(torch.nn.Linear(WIDTH, EXPERTS, dtype=dtype), CHOSEN, normalised=True),
        torch.nn.Identity(),
        gate_up=linears(2 * INNER, WIDTH, dtype, **kind),
        down=linears(WIDTH, INNER, dtype, **kind),
        activation=None,
        gate=gate,
    )


def gate(x: torch.Tensor) -> torch.Tensor:
    """Like Llama's."""
    left, right = x.chunk(2, -1)
    return silu(left) * right


def expected(experts: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Token by token in float64, rounded where results stand in memory."""
    rows = []
    for row, numbers in enumerate(chosen.tolist()):
        results = []
        for number in numbers:
            inner = product(experts.gate_up, number, x[row])
            results.append(product(experts.down, number, gate(inner)).double())
        rows.append((torch.stack(results) * shares[row, :, None].double()).sum(0))
    return torch.stack(rows).to(x.dtype)


def product(layers: ExpertLinears, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One row of one expert."""
    bias = None if layers.bias is None else layers.bias[expert].double()
    return torch.nn.functional.linear(x.double(), layers.weight[expert].double(), bias).to(x.dtype)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("experts", "count"), [(8, 2), (60, 4), (128, 8)])
def test_a_choice_is_that_of_torch(experts, count, normalised):
    """The best first, with shares of the chosen or of all; among equals the first."""
    router = Router(torch.nn.Linear(WIDTH, experts), count, normalised=normalised)
    x = torch.randn((5, WIDTH))
    for ours, theirs in zip(choose(router, x), router(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.nn.init.zeros_(router.scores.weight)
    torch.nn.init.zeros_(router.scores.bias)
    assert choose(router, x)[0].tolist() == [list(range(count))] * 5


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_pairs_are_ordered_by_expert(monkeypatch, rows):
    """Those of an expert follow each other, also where some experts have none."""
    monkeypatch.setattr(launches, "ARRANGED", 16)
    chosen = torch.randint(1, EXPERTS - 1, (rows, CHOSEN), generator=torch.Generator().manual_seed(rows))
    pairs = arranged(chosen, EXPERTS)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    assert pairs.ends.tolist() == counts.cumsum(0).tolist()
    assert pairs.order.tolist() == chosen.flatten().argsort(stable=True).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_sums_are_those_of_each_token(rows, turned, dtype):
    """Experts with less than a tile of rows and with several; weights as they are and turned, with biases."""
    experts = mixture(dtype, turned=turned, bias=turned)
    x = torch.randn((rows, WIDTH), dtype=dtype)
    chosen, shares = experts.router(x)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    found = expert_sum(experts, gate, x, chosen, shares)
    torch.testing.assert_close(found, expected(experts, x, chosen, shares), rtol=tolerance, atol=tolerance)


def test_all_tokens_may_choose_the_same():
    """No expert beside theirs is asked, and theirs has many tiles."""
    experts = mixture()
    x = torch.randn((80, WIDTH))
    chosen, shares = torch.tensor([[4, 0]]).repeat(80, 1), torch.full((80, 2), 0.5)
    experts.gate_up.weight[1:4] = torch.nan
    found = expert_sum(experts, gate, x, chosen, shares)
    torch.testing.assert_close(found, expected(experts, x, chosen, shares), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    """By itself, in any place of a tile, beside rows with the same experts and with others."""
    experts = mixture(dtype)
    x = torch.randn((80, WIDTH), dtype=dtype)
    chosen, shares = experts.router(x)

    def sums(rows: torch.Tensor) -> torch.Tensor:
        return expert_sum(experts, gate, x[rows], chosen[rows], shares[rows])

    alone = torch.cat([sums(torch.tensor([row])) for row in range(80)])
    for rows in (torch.arange(3), torch.arange(5, 40), torch.randperm(80)):
        assert torch.equal(sums(rows), alone[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bounded_gate_is_that_of_torch(dtype):
    """Numbers within the limit and beyond it."""
    gate, x = BoundedGate(1.702, 7.0), 5 * torch.randn((3, 2 * 1030), dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(bounded(gate, x), gate(x), rtol=tolerance, atol=tolerance)


def test_other_rows_than_it_is_for_are_refused():
    """The kernels would read beside them."""
    experts = mixture()
    chosen = torch.zeros((4, 2), dtype=torch.int64)
    pairs = arranged(chosen, EXPERTS)
    with pytest.raises(ValueError, match="x is"):
        expert_product(torch.zeros(4, WIDTH - 1), experts.gate_up, pairs, 2)
    with pytest.raises(ValueError, match="shares is"):
        expert_sum(
            experts, gate, torch.zeros(2, WIDTH), torch.zeros((2, 2), dtype=torch.int64), torch.ones(2, 1)
        )
