"""The largest numbers of long rows through Triton's interpreter, against torch's."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling import top as launching
from outrider.sampling.top import most_likely, top


def numbers(rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, all different."""
    order = [torch.randperm(size, generator=torch.Generator().manual_seed(row)) for row in range(rows)]
    return torch.stack(order).to(dtype) / size * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "count"), [(7, 7), (100, 8), (2048, 1), (5000, 8)])
def test_the_largest_of_rows_are_those_of_torch(size, count, dtype):
    """Rows of one block and of several, the last of them not full."""
    given = numbers(3, size, dtype)
    found, expected = top(given, count), given.topk(count)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.columns, expected.indices)


def test_columns_of_wider_rows_are_taken_as_they_are():
    """As the logits of a batch in the memory of a larger one are."""
    given = numbers(3, 6000)[:, 100:5000]
    assert torch.equal(top(given, 4).columns, given.topk(4).indices)


def test_the_first_of_equal_numbers_comes_first(monkeypatch):
    """In one block and in different ones."""
    monkeypatch.setattr(launching, "BLOCK", 16)
    given = torch.zeros(1, 100)
    given[0, [3, 5, 40, 90]] = 1.0
    assert top(given, 6).columns.tolist() == [[3, 5, 40, 90, 0, 1]]


def test_rows_with_few_numbers_end_with_minus_infinity():
    """Whose columns exist, since tokens are looked up by them."""
    given = torch.full((2, 3000), -torch.inf)
    given[0, 2999] = 1.0
    found = top(given, 4)
    assert found.values.tolist() == [[1.0] + [-torch.inf] * 3, [-torch.inf] * 4]
    assert found.columns[0, 0] == 2999
    assert int(found.columns.max()) < 3000


def test_probabilities_are_those_of_all_tokens():
    """Of rows whose best tokens are in one block, and of rows with tokens that are ruled out."""
    logits = numbers(3, 5000)
    logits[1, ::2] = -torch.inf
    logits[2, 2000:] = -torch.inf
    tokens, values, shares = most_likely(logits, 8)
    expected = logits.topk(8)
    assert torch.equal(tokens, expected.indices)
    assert torch.equal(values, expected.values)
    torch.testing.assert_close(shares, logits.softmax(-1).gather(1, tokens))


def test_more_than_blocks_can_yield_are_refused():
    """Blocks that yielded all they have would never get fewer."""
    with pytest.raises(ValueError, match="257 numbers"):
        top(numbers(1, 3000), 257)
