"""Kernels between the products: right, within their rows, and the same bits in every batch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from outrider.engine.cpu.layer import (
    MIN_POSITIONS,
    ActivationKernel,
    Angles,
    AttentionKernel,
    BoundKernel,
    GateKernel,
    NormKernel,
    RotationKernel,
)
from outrider.engine.cpu.processor import LANES
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder.activation import NAMES, Activation
from outrider.engine.step import View
from tests.unit.engine.kernel_marks import dtypes, needs_kernels

pytestmark = needs_kernels
WIDTHS = (5, LANES, 40, 300)
"""Less than a vector, one, and some with a rest."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vectorwise(name: str) -> Callable[[Tensor], Tensor]:
    """A function of vectors, as a kernel of its own."""
    from tests.unit.engine import vectorwise as kernels

    call = getattr(kernels, name)

    def run(x: Tensor) -> Tensor:
        x = x.clone()  # torch aligns it
        y = torch.empty_like(x)
        call(x.data_ptr(), y.data_ptr(), len(x))
        return y

    return run


@pytest.fixture(scope="module")
def exponential() -> Callable[[Tensor], Tensor]:
    """The kernels' e^x."""
    return vectorwise("exponential")


def every_exponent(count: int) -> Tensor:
    """Floats of all signs and exponents, denormal ones too: `count` steps through the bit patterns."""
    bits = torch.linspace(0, 0xFFFF_FFFF, count, dtype=torch.float64).to(torch.int64)
    patterns = [struct.unpack("f", struct.pack("I", pattern))[0] for pattern in bits.tolist()]
    numbers = torch.tensor(patterns)
    return numbers[torch.isfinite(numbers)][: count // 2 // LANES * LANES]


def test_exponential_is_exact_to_a_unit(exponential: Callable[[Tensor], Tensor]) -> None:
    """Over all results that are normal numbers, against float64; `epilogue` states the largest error."""
    x = torch.linspace(-87.3, 88.7, LANES * 20_000)
    exact = x.double().exp()
    unit = torch.finfo(torch.float32).eps * 2 ** exact.log2().floor()
    assert float(((exponential(x).double() - exact).abs() / unit).max()) < 1.0


def test_exponential_at_the_edges(exponential: Callable[[Tensor], Tensor]) -> None:
    """Infinity, NaN, zeros, overflow, underflow through the denormal numbers."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 88.72, 88.73, 1e38, -1e38, -104.0, -103.9, 1e-45, -1e-45])
    x = torch.cat([x, torch.tensor([-87.4, -95.0, -103.2])])
    got, expected = exponential(x), x.double().exp().float()
    assert torch.equal(got.isnan(), x.isnan())
    torch.testing.assert_close(got, expected, rtol=2.4e-7, atol=1.5e-45, equal_nan=True)
    assert got[[6, 8, 3]].tolist() == [inf, 0.0, 0.0]


def test_exponential_of_everything(exponential: Callable[[Tensor], Tensor]) -> None:
    """Numbers of every sign and exponent, as torch computes them."""
    x = every_exponent(2**16)
    torch.testing.assert_close(exponential(x), x.exp(), rtol=5e-7, atol=1.5e-45)


def test_silu_is_torchs() -> None:
    """Within the rounding of the exponential, for every exponent and what is no number."""
    kernel = vectorwise("silu")
    x = torch.cat([every_exponent(2**16), torch.linspace(-110, 110, LANES * 1000)])
    torch.testing.assert_close(kernel(x), silu(x), rtol=1e-6, atol=1e-44)
    special = torch.tensor([float("inf"), float("nan"), float("-inf"), -0.0] * 4)
    torch.testing.assert_close(kernel(special), silu(special), equal_nan=True)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float64."""
    exact = x.double()
    return exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_and_residual_add(dtype: torch.dtype, width: int) -> None:
    """The sum is rounded as torch rounds it and stays in place; the norm is the sum's."""
    weight, eps = random(width, dtype=dtype, seed=3), 1e-6
    norm = NormKernel(weight, eps, dtype)
    x, added = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    x[1] *= 1e-4
    x[2] = added[2] = 0.0
    torch.testing.assert_close(norm(x), exact_norm(x, weight, eps).to(dtype))
    total = x + added
    result = norm.after(x, added)
    assert torch.equal(x, total)
    torch.testing.assert_close(result, exact_norm(total, weight, eps).to(dtype))


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_that_centres_rows(dtype: torch.dtype, width: int, biased: bool) -> None:
    """As in float64, also far from 0, where all numbers are equal, and where eps decides."""
    weight, eps = random(width, dtype=dtype, seed=3), 1e-5
    bias = random(width, dtype=dtype, seed=4) if biased else None
    norm = NormKernel(weight, eps, dtype, centred=True, bias=bias)
    x, added = random(6, width, dtype=dtype), random(6, width, dtype=dtype, seed=1)
    x[1] *= 1e-4
    x[2], added[2] = 3.0, 0.0
    x[3] += 100.0

    def exact(rows: Tensor) -> Tensor:
        shift = None if bias is None else bias.double()
        return layer_norm(rows.double(), (width,), weight.double(), shift, eps).to(dtype)

    close = {"rtol": 2e-4, "atol": 2e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(norm(x), exact(x), **close)
    total = x + added
    result = norm.after(x, added)
    assert torch.equal(x, total)
    torch.testing.assert_close(result, exact(total), **close)


def norms(dtype: torch.dtype) -> list[NormKernel]:
    """Of both kinds, for rows of 40 numbers."""
    weight = random(40, dtype=dtype)
    return [NormKernel(weight, 1e-5, dtype), NormKernel(weight, 1e-5, dtype, centred=True, bias=weight)]


@dtypes
@pytest.mark.parametrize("kind", [0, 1])
def test_a_norm_s_bits_do_not_depend_on_the_batch(dtype: torch.dtype, kind: int) -> None:
    """Rows are computed one by one; none is fine."""
    norm, x = norms(dtype)[kind], random(7, 40, dtype=dtype, seed=1)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
    assert norm(x[:0]).shape == (0, 40)


activations = pytest.mark.parametrize("activation", NAMES, ids=NAMES.get)


@dtypes
@activations
def test_activations_are_torchs(dtype: torch.dtype, activation: Activation) -> None:
    """For every exponent, where tails are small, and what is no number; numbers are overwritten."""
    x = torch.cat([every_exponent(2**14), torch.linspace(-30, 30, 5000), torch.tensor([float("nan"), -0.0])])
    x = torch.cat([x, torch.tensor([float("inf")])]).to(dtype)
    expected = activation(x.double()).to(dtype)
    kernel, result = ActivationKernel(dtype, NAMES[activation]), x.clone()
    assert kernel(result) is result
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {}
    torch.testing.assert_close(result, expected, equal_nan=True, **close)


@dtypes
@activations
def test_an_activation_of_a_number_does_not_depend_on_its_place(
    dtype: torch.dtype, activation: Activation
) -> None:
    """In a whole vector, in the rest behind it, and alone."""
    kernel, x = ActivationKernel(dtype, NAMES[activation]), random(LANES + 5, dtype=dtype)
    assert torch.equal(kernel(x.clone()), torch.cat([kernel(one.clone()) for one in x.split(1)]))


@dtypes
@activations
@pytest.mark.parametrize("width", [1, LANES, 3 * LANES + 5])
def test_a_gate_is_its_activation_times_up(dtype: torch.dtype, activation: Activation, width: int) -> None:
    """Rounded behind the activation and behind the product, as the modules of a model do; rows may lie
    apart."""
    x = random(3, 2 * width + 7, dtype=dtype)[:, : 2 * width]
    gate, up = x.chunk(2, 1)
    expected = ActivationKernel(dtype, NAMES[activation])(gate.contiguous()) * up
    assert torch.equal(GateKernel(dtype, NAMES[activation])(x), expected)


@dtypes
def test_bounded_numbers_are_torchs(dtype: torch.dtype) -> None:
    """Also far outside of the bound, where it is reached, and what is no number."""
    x = torch.cat([torch.linspace(-500, 500, 3001), torch.tensor([0.0, float("inf"), float("nan")])]).to(
        dtype
    )
    found, expected = BoundKernel(dtype, 30.0)(x.clone()), torch.tanh(x / 30.0) * 30.0
    near = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=near, equal_nan=True)
    assert found[:3001].abs().max() == 30.0


@dtypes
@pytest.mark.parametrize("half", [4, LANES, 20, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_turn_rotates_and_stores(dtype: torch.dtype, half: int, normed: bool) -> None:
    """Queries and keys turn by their position, after their norm; keys and values go to their slots."""
    queries, keys, width = 4, 2, 2 * half
    qkv, frequencies = random(5, queries + 2 * keys, width, dtype=dtype), torch.linspace(1, 0.01, half)
    positions = torch.tensor([0, 3, MIN_POSITIONS - 1, MIN_POSITIONS, 17])
    weight = random(queries + keys, width, dtype=dtype, seed=1) if normed else None
    before, slots = qkv.clone(), torch.tensor([3, 1, 8, 0])
    entries = torch.zeros(9, 2 * keys, width, dtype=dtype)
    table = Angles(frequencies, 2.0).table(positions)
    RotationKernel(dtype, (queries, keys, 2 * keys), weight, 1e-6)(qkv, table, positions, entries, slots)
    heads = before[:, : queries + keys]
    if weight is not None:
        heads = exact_norm(heads, weight, 1e-6).to(dtype)
    low, high = heads.double().chunk(2, -1)
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    cos, sin = 2 * angles.cos(), 2 * angles.sin()
    expected = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(dtype)
    close = {"rtol": 2e-3, "atol": 4e-3} if dtype == torch.float16 else {}  # a norm's last digit may differ
    torch.testing.assert_close(qkv[:, : queries + keys], expected, **close)
    assert torch.equal(qkv[:, queries + keys :], before[:, queries + keys :])
    assert torch.equal(entries[slots], qkv[:4, queries:])
    assert not entries[[2, 4, 5, 6, 7]].any()


@dtypes
@pytest.mark.parametrize("half", [0, 2, LANES + 3])
def test_the_first_columns_turn_alone(dtype: torch.dtype, half: int) -> None:
    """The others of a head stay as they are, all of them without rotary positions; all are stored."""
    queries, keys, width = 4, 2, 4 * LANES
    qkv, positions = random(3, queries + 2 * keys, width, dtype=dtype), torch.tensor([4, 0, 9])
    whole = qkv[..., : 2 * half].contiguous()
    rest, slots = qkv[..., 2 * half :].clone(), torch.tensor([5, 2, 0])
    table = Angles(torch.linspace(1, 0.01, half), 1.0).table(positions)
    turn = RotationKernel(dtype, (queries, keys, 2 * keys), None, 0.0)
    entries = torch.zeros(6, 2 * keys, width, dtype=dtype)
    turn(qkv, table, positions, entries, slots)
    if half:
        turn(whole, table, positions, entries, slots[:0])
    assert torch.equal(qkv[..., : 2 * half], whole)
    assert torch.equal(qkv[..., 2 * half :], rest)
    assert torch.equal(entries[slots], qkv[:, queries:])


@dtypes
def test_a_row_turns_alike_in_every_batch(dtype: torch.dtype) -> None:
    """Its bits are the same by itself."""
    qkv, positions = random(2, 4, 8, dtype=dtype), torch.tensor([1, 2])
    table, entries = Angles(torch.ones(4), 1.0).table(positions), torch.zeros(3, 2, 8, dtype=dtype)
    alone = qkv[1:].clone()
    turn = RotationKernel(dtype, (2, 1, 2), None, 0.0)
    turn(qkv, table, positions, entries, positions)
    turn(alone, table, positions[1:], entries, positions[1:])
    assert torch.equal(qkv[1:], alone)


CASES = [
    (1, 1, 3, 64, 23, [1]),
    (1, 2, 2, 20, 37, [9]),
    (3, 2, 4, 36, 37, [1, 5, 3]),
    (2, 1, 1, 128, 5, [40, 2]),
    (1, 2, 3, 32, 150, [130]),
]
"""(sequences, kv heads, query heads for each, width, keys, tokens of each sequence)."""


def view_of(slots: Tensor, mask: Tensor | None, open_keys: int, counts: list[int]) -> View:
    """What queries see at slots [B * L] through a mask [B, 1, rows, L], as a step plans it."""
    keys, rows = len(slots) // len(counts), max(counts)
    ends = torch.full((len(counts) * rows,), keys)
    if mask is not None:
        ends = keys - (mask == 0).flip(-1).int().argmax(-1).flatten()
    return View(slots, mask, False, False, open_keys, torch.tensor(counts), ends)


def close(result: Tensor, expected: Tensor) -> None:
    """Compare attention's results; weights are rounded to the dtype, so small sums of large values differ."""
    rounding = max(torch.finfo(result.dtype).eps, 2e-6)
    torch.testing.assert_close(result, expected.to(result.dtype), atol=rounding, rtol=rounding)


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("hidden", [False, True])
def test_attention_is_the_plain_one(
    dtype: torch.dtype, case: tuple[int, int, int, int, int, list[int]], hidden: bool
) -> None:
    """Several tiles, lanes that are not full, widths with a rest, keys that some queries do not see."""
    sequences, kv_heads, per_kv, width, keys, counts = case
    queries = random(sum(counts), kv_heads * per_kv + 3, width, dtype=dtype)[:, : kv_heads * per_kv]
    entries = random(60, 2 * kv_heads, width, dtype=dtype, seed=1)
    slots = torch.randint(60, (sequences * keys,), generator=torch.Generator().manual_seed(2))
    mask, open_keys = None, 0
    if hidden:
        mask = random(sequences, 1, max(counts), keys, seed=3).sign().clamp(max=0) * torch.inf
        mask, open_keys = mask.nan_to_num(0.0, neginf=-torch.inf), 2
        mask[..., :open_keys] = 0.0
    view = view_of(slots, mask, open_keys, counts)
    result = torch.full(queries.shape, 7.0, dtype=dtype)
    kernel = AttentionKernel(dtype, kv_heads, kv_heads * width)
    kernel(queries, entries.flatten(1), view, 0.3, result)
    first = 0
    for index, count in enumerate(counts):
        seen = entries[slots.view(sequences, -1)[index]].double().transpose(0, 1)
        k, v = (part.repeat_interleave(per_kv, 0) for part in seen.chunk(2))
        rows = queries[first : first + count].double().transpose(0, 1)
        hides = None if mask is None else mask[index, 0, :count].double()
        expected = scaled_dot_product_attention(rows, k, v, attn_mask=hides, scale=0.3).transpose(0, 1)
        close(result[first : first + count], expected)
        first += count


@dtypes
@pytest.mark.parametrize("heads", [(2, 40, 25, 80), (1, 40, 25, 40), (1, 136, 104, 32)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_values_may_be_of_another_width(
    dtype: torch.dtype, heads: tuple[int, int, int, int], tokens: int
) -> None:
    """Also where they are columns of the keys: (kv heads, width, width of values, where values begin)."""
    kv_heads, width, columns, start = heads
    queries = random(tokens, 3 * kv_heads, width, dtype=dtype)
    entries = random(30, max(start + kv_heads * columns, kv_heads * width), dtype=dtype, seed=1)
    slots = torch.randperm(30)[:19]
    result = torch.full((tokens, 3 * kv_heads, columns), 7.0, dtype=dtype)
    AttentionKernel(dtype, kv_heads, start)(queries, entries, view_of(slots, None, 0, [tokens]), 0.2, result)
    seen = entries[slots].double()
    k = seen[:, : kv_heads * width].view(19, kv_heads, width).transpose(0, 1).repeat_interleave(3, 0)
    v = seen[:, start : start + kv_heads * columns].view(19, kv_heads, columns).transpose(0, 1)
    rows, v = queries.double().transpose(0, 1), v.repeat_interleave(3, 0)
    expected = scaled_dot_product_attention(rows, k, v, scale=0.2).transpose(0, 1)
    close(result, expected)


@dtypes
@pytest.mark.parametrize("width", [64, 40, 6])
@pytest.mark.parametrize("seen", [[0, 1, 2, 3, 4], [0, 1, 2, 4, 7, 18]])
@pytest.mark.parametrize("bounded", [False, True])
def test_attention_s_bits_depend_on_what_is_seen_alone(
    dtype: torch.dtype, width: int, seen: list[int], bounded: bool
) -> None:
    """Not on keys that are hidden, on others beside a query, or on the room that came before."""
    entries, queries = random(20, 2 * width, dtype=dtype), random(9, 2, width, dtype=dtype, seed=1)
    kernel, alone = AttentionKernel(dtype, 1, width), torch.empty(1, 2, width, dtype=dtype)
    bounds = (2.0, torch.tensor([0.5, 1.0])) if bounded else ()
    kernel(queries[4:5], entries, view_of(torch.tensor(seen), None, 0, [1]), 0.2, alone, *bounds)
    mask = torch.zeros(1, 1, 9, 20)
    mask[:, :, :4, 5:] = mask[:, :, 4] = -torch.inf
    mask[:, :, 4, seen] = 0.0
    among = torch.empty(9, 2, width, dtype=dtype)
    kernel(queries, entries, view_of(torch.arange(20), mask, 3, [9]), 0.2, among, *bounds)
    assert torch.equal(among[4:5], alone)


@dtypes
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_are_bounded_and_join_those_of_sinks(
    dtype: torch.dtype, tokens: int, softcap: float | None, sinks: bool
) -> None:
    """A sink takes a share of the weights and has no value, also one far above all scores or below them."""
    kv_heads, per_kv, width = 2, 3, 40
    queries = random(tokens, kv_heads * per_kv, width, dtype=dtype)
    entries = random(30, 2 * kv_heads, width, dtype=dtype, seed=1)
    slots, result = torch.randperm(30)[:19], torch.full(queries.shape, 7.0, dtype=dtype)
    given = torch.tensor([0.5, -3.0, 60.0, 2.0, -200.0, 1.0], dtype=dtype) if sinks else None
    kernel = AttentionKernel(dtype, kv_heads, kv_heads * width)
    kernel(queries, entries.flatten(1), view_of(slots, None, 0, [tokens]), 0.3, result, softcap, given)
    k, v = (part.repeat_interleave(per_kv, 1) for part in entries[slots].double().chunk(2, 1))
    scores = torch.einsum("nqd,lqd->qnl", queries.double(), k) * 0.3
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if given is not None:
        scores = torch.cat((scores, given.double()[:, None, None].expand(-1, tokens, 1)), 2)
    expected = torch.einsum("qnl,lqd->nqd", scores.softmax(2)[..., :19], v)
    close(result, expected)


class CountingPool(WorkerPool):
    """Notes by how many threads each call is shared."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.sizes: list[int] = []

    def run(self, kernel: Callable[..., None], table: array[int], parts: int, size: int) -> None:
        """See `WorkerPool.run`."""
        self.sizes.append(size)
        super().run(kernel, table, parts, size)


@dtypes
@pytest.mark.parametrize("tokens", [1, 40])
def test_threads_share_the_tiles_of_long_contexts(dtype: torch.dtype, tokens: int) -> None:
    """Two threads compute the bits of one."""
    entries, queries = random(8192, 512, dtype=dtype), random(tokens, 8, 64, dtype=dtype, seed=1)
    view, pool = view_of(torch.arange(8192), None, 0, [tokens]), CountingPool(2)
    alone, shared = (torch.full(queries.shape, 7.0, dtype=dtype) for _ in range(2))
    AttentionKernel(dtype, 4, 256)(queries, entries, view, 0.2, alone)
    AttentionKernel(dtype, 4, 256, pool)(queries, entries, view, 0.2, shared)
    assert torch.equal(alone, shared)
    assert pool.sizes == [2]
