"""The noise is one function of (seed, position, token), exact to the bit everywhere."""

from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from outrider.sampling import noise
from outrider.sampling.noise import GROUP, gumbel, gumbel_rows, peaks, row_keys

GOLDEN = [  # (seed, position, token, noise x 2^44)
    (0, 0, 0, -9871181488463),
    (0, 0, 1, 16024645449545),
    (0, 0, 63, 9047778648870),
    (0, 0, 64, 401137392156),
    (0, 0, 4095, -14410545055497),
    (1, 0, 0, 18621903666105),
    (1, 0, 1, 9017570225972),
    (0, 1, 0, 14884533135850),
    (2**64 - 1, 2**31 - 1, 128255, 4585277562546),
    (2**64 - 1, 2**31 - 1, 151935, 16950974915859),
    (1234567890123456789, 777, 42, 17569584020956),
    (1234567890123456789, 777, 43, -12166356412354),
]


@pytest.mark.parametrize(("seed", "position", "token", "scaled"), GOLDEN)
def test_values_never_change(seed: int, position: int, token: int, scaled: int) -> None:
    """Golden values: a change here would change every sampled text."""
    assert gumbel(seed, position, torch.tensor([token])).item() * 2**44 == scaled


def test_another_process_draws_the_same_bits() -> None:
    """Draft and verify service agree without talking."""
    script = (
        "import torch; from outrider.sampling.noise import gumbel;"
        "print(gumbel(99, 1234, torch.arange(500)).numpy().tobytes().hex())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == gumbel(99, 1234, torch.arange(500)).numpy().tobytes().hex()


def test_torch_and_numpy_operations_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's path (torch operations) and the CPU's (numpy) are one function."""
    keys = row_keys([5, 6], [7, 8])
    tokens = torch.randint(0, 200_000, (2, 5000), generator=torch.Generator().manual_seed(1))
    on_numpy = gumbel_rows(keys, tokens)
    monkeypatch.setattr(noise, "_native", lambda tensor: tensor)
    assert torch.equal(gumbel_rows(keys, tokens), on_numpy)


def test_tables_do_not_depend_on_the_math_library() -> None:
    """Every table entry is far enough from a rounding edge for any libm, and equals 40-digit arithmetic."""
    with localcontext() as context:
        context.prec = 40
        ratios = [Decimal(1)]
        ratios += [-(1 - Decimal(i) / 2048).ln() / (Decimal(i) / 2048) for i in range(1, 1025)]
        logs = [(1 + Decimal(i) / 1024).ln() for i in range(1025)]
        for exact, table, bits in ((ratios, noise.ratio_table(), 23), (logs, noise.log_table(), 32)):
            for value, entry in zip(exact, table, strict=True):
                distance = abs(value * 2**bits - entry)
                assert distance < Decimal("0.5")
                assert (Decimal("0.5") - distance) / 2**bits > Decimal("1e-14")
        assert round(Decimal(2).ln() * 2**58) == noise.LN2_EXPONENTIAL
        assert round(Decimal(2).ln() * 2**44) == noise.LN2_NOISE


def test_map_is_accurate_over_its_whole_range() -> None:
    """The fixed-point map stays within 3e-7 of the exact quantile, tails included."""
    generator = np.random.default_rng(3)
    uniform = generator.integers(0, 2**38, 4000) >> generator.integers(0, 38, 4000)
    half_lives = generator.integers(0, 21, 4000)
    hashed = (uniform << 26) | ((1 << 20 - half_lives) - 1) << 6
    drawn = noise._minus_log(noise._exponential(hashed))
    exact_exponential = half_lives * math.log(2) - np.log1p(-(2 * uniform + 1) / 2.0**40)
    assert np.abs(drawn + np.log(exact_exponential)).max() < 3e-7


def test_peaks_are_the_largest_noise_of_their_group() -> None:
    """No token exceeds its group's peak, and the named token has it."""
    keys = row_keys([11, 12, 13], [0, 50, 100])
    noise, tokens = peaks(keys, 200)
    drawn = gumbel_rows(keys, torch.arange(200 * GROUP).expand(3, -1)).view(3, 200, GROUP)
    assert torch.equal(drawn.amax(-1), noise)
    assert torch.equal(drawn.argmax(-1), tokens - torch.arange(200) * GROUP)


def test_seed_position_and_token_all_matter() -> None:
    """Neighbouring seeds, positions and tokens share nothing."""
    tokens = torch.arange(256)
    base = gumbel(1, 1, tokens)
    assert not (base == gumbel(2, 1, tokens)).any()
    assert not (base == gumbel(1, 2, tokens)).any()
    assert base.unique().numel() == 256


def test_tables_made_under_inference_mode_serve_outside_of_it() -> None:
    """The first draw may happen anywhere."""
    noise._ratio_table.cache_clear()
    with torch.inference_mode():
        inside = gumbel(1, 2, torch.arange(4))
    assert torch.equal(inside.clone(), gumbel(1, 2, torch.arange(4)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits() -> None:
    """Draft and target may run on different devices."""
    keys, tokens = row_keys([5, 6], [7, 8]), torch.arange(200_000).expand(2, -1)
    assert torch.equal(gumbel_rows(keys.cuda(), tokens.cuda()).cpu(), gumbel_rows(keys, tokens))
