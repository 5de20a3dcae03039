"""What stands in a step's buffer, read as the kernels read it; without a kernel."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.gpu.layout import ITEM_FIELDS, MOVES, TILE_FIELDS, BufferLayout
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.step import Segment

PAGE, TRASH = 4, 10**6


def grown(pool: PagePool, random: np.random.Generator) -> Segment:
    """A sequence with some context and scratch, and new tokens that are appended: a chain or a tree."""
    kv = SequenceKv.open(pool, [])
    committed, earlier, count = (int(random.integers(low, high)) for low, high in ((1, 90), (0, 4), (1, 75)))
    kv.reserve(committed)
    kv.append([1] * committed, None)
    kv.commit(range(committed), [1] * committed)
    kv.reserve(earlier + count)
    kv.append([2] * earlier, None)
    tokens = random.integers(0, 1000, count).tolist()
    branches = [int(random.integers(-1, earlier + index)) for index in range(count)]
    parents = None if random.integers(2) else branches
    kv.append(tokens, parents)
    return Segment(kv, tokens, parents, sorted(set(random.integers(0, count, 5).tolist())))


def seen_by(words: np.ndarray, layout: BufferLayout, tile: np.ndarray, token: int) -> set[int]:
    """The entries that a token of a tile sees, as the kernel decides it."""
    length, depths = int(tile[2]), int(tile[4])
    own, mask = (int(words[layout.at(name) + token]) for name in ("own", "masks"))
    if not depths:
        return set(range(own + 1))
    scratch = range(own + 1 - length)
    return {*range(length), *(length + c for c in scratch if words[mask + c // 64] >> (c % 64) & 1)}


@pytest.mark.parametrize("padding", [0, 40])
@pytest.mark.parametrize("seed", range(8))
def test_the_buffer_says_what_each_token_is_and_sees(seed, padding):
    """Random chains and trees, also wider than a mask word, with padding behind them or none."""
    random = np.random.default_rng(seed)
    pool, settings = PagePool(400, PAGE), PlanSettings(2, PAGE, TRASH, 5)
    pool.allocate(3)
    segments = [grown(pool, random) for _ in range(1 + seed)]
    total = sum(len(segment.tokens) for segment in segments)
    plan = plan_tiles(segments, total + padding, settings)
    layout = BufferLayout(graph_capacity(total + padding, settings) if padding else plan.capacity)
    words = fill(plan, layout, segments, [(5, 6), (7, 8)], settings)

    tiles = words[layout.tiles_at :][: len(plan.tiles) * TILE_FIELDS].reshape(-1, TILE_FIELDS)
    items = words[layout.items_at :][: int(words[0]) * ITEM_FIELDS].reshape(-1, ITEM_FIELDS)
    token, wanted = 0, []
    for segment in segments:
        kv, count = segment.kv, len(segment.tokens)
        wanted += [token + index for index in segment.wanted]
        ancestors, positions = kv.ancestors(kv.scratch - count), kv.positions(kv.scratch - count)
        for index in range(count):
            entry = kv.length + kv.scratch - count + index
            tile = tiles[words[layout.at("tile_of") + token]]
            assert tile[0] <= token < tile[0] + tile[1]
            assert words[layout.at("tokens") + token] == segment.tokens[index]
            assert words[layout.at("positions") + token] == positions[index] >= tile[5]
            assert words[layout.at("slots") + token] == kv.slots[entry]
            assert words[layout.at("own") + token] == entry
            expected = {*range(kv.length), *(kv.length + np.flatnonzero(ancestors[index])).tolist()}
            assert seen_by(words, layout, tile, token) == expected
            pages = words[tile[3] : tile[3] + -(-(kv.length + kv.scratch) // PAGE)]
            assert pages.tolist() == kv.pages[: len(pages)]
            if tile[4]:
                assert words[tile[4] : tile[4] + kv.scratch].tolist() == kv.depths
            token += 1
    assert words[layout.at("wanted") :][: len(wanted)].tolist() == wanted
    assert (words[layout.at("slots") :][total : total + padding] == TRASH).all()
    assert (words[layout.at("tile_of") :][total : total + padding] == -1).all()
    assert words[1] == 2
    assert words[layout.moves_at :][:2].tolist() == [5, 7]
    assert words[layout.moves_at + MOVES :][:2].tolist() == [6, 8]
    check_items(segments, plan, tiles, items)


def check_items(segments, plan, tiles, items) -> None:
    """Every tile's items follow each other from its first entry to the last that one of its tokens sees."""
    for index, (row, tile) in enumerate(zip(tiles, plan.tiles, strict=True)):
        kv, count = segments[tile[0]].kv, len(segments[tile[0]].tokens)
        last = kv.length + kv.scratch
        own = items[row[6] : row[6] + row[7]]
        assert (own[:, 0] == index).all()
        assert own[0, 1] == 0
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert own[-1, 2] == (last - count + tile[1] + tile[2] if kv.is_chain else last)
    assert sum(row[7] for row in tiles) == len(items)


def test_a_step_without_tokens_is_padding_alone():
    """What graphs are captured with."""
    settings = PlanSettings(2, PAGE, TRASH, 5)
    layout = BufferLayout(graph_capacity(8, settings))
    words = fill(plan_tiles([], 8, settings), layout, [], [], settings)
    assert words[0] == 0
    assert words[layout.at("slots") :][:8].tolist() == [TRASH] * 8
    assert words[layout.at("tile_of") :][:8].tolist() == [-1] * 8
