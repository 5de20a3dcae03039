"""The bytes of a page are all that another replica needs to have the same page."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv.page_memory import PageMemory

LAYERS, PAGES, SIZE, HEADS = 3, 5, 4, 2


def stores(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Keys and values of different widths; one slot behind the last page."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn((LAYERS, PAGES * SIZE + 1, HEADS, width), generator=generator).to(dtype)
        for width in (6, 4)
    ]


def entries(store: torch.Tensor, page: int) -> torch.Tensor:
    """One page of a store."""
    return store[:, page * SIZE : (page + 1) * SIZE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_page_that_is_written_equals_the_one_that_was_read(dtype: torch.dtype) -> None:
    """In every bit, in all layers, whatever its number was; other pages stay as they were."""
    mine, theirs = stores(dtype, 1), stores(dtype, 2)
    before = [store.clone() for store in theirs]
    content = PageMemory(mine, SIZE).read(3, SIZE)
    memory = PageMemory(theirs, SIZE)
    assert len(content) == memory.page_bytes == LAYERS * SIZE * HEADS * 10 * dtype.itemsize
    memory.write(1, content)
    for own, other, old in zip(mine, theirs, before, strict=True):
        assert torch.equal(entries(other, 1), entries(own, 3))
        for page in (0, 2, 3, 4):
            assert torch.equal(entries(other, page), entries(old, page))
        assert torch.equal(other[:, -1], old[:, -1])


def test_what_lies_behind_the_last_entry_is_not_told() -> None:
    """It may be of another sequence; reading changes nothing in the memory."""
    mine = stores(torch.float32, 1)
    before = [store.clone() for store in mine]
    memory = PageMemory(mine, SIZE)
    content = memory.read(2, 3)
    assert all(torch.equal(store, old) for store, old in zip(mine, before, strict=True))
    memory.write(0, content)
    for store in mine:
        assert torch.equal(entries(store, 0)[:, :3], entries(store, 2)[:, :3])
        assert not entries(store, 0)[:, 3:].any()


def test_the_shape_says_how_a_page_is_made() -> None:
    """Of all its parts, in order."""
    assert PageMemory(stores(torch.float32, 1), SIZE).shape == "3x4x2x6+3x4x2x4"


def test_a_memory_of_one_page_is_not_changed_by_reading() -> None:
    """What is read is a copy even where the page is the whole store."""
    only = torch.ones((1, SIZE, 1, 2))
    PageMemory([only], SIZE).read(0, 1)
    assert only.all()
