"""Attention in one order: near the reference, and in the same bits whatever is computed beside a token."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.gpu import ordered_plan
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.layout import BufferLayout
from outrider.engine.gpu.ordered_plan import plan_in_order
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Segment
from tests.unit.engine.gpu.cases import CPU, PAGE, SLOTS, Case, chain, geometry, tree

TEXT = 700
DECOYS = 100
NEW = 5
"""Tokens that are computed behind a context."""
EDGES = [1, 62, 127, 256, 509]
"""More contexts around blocks and splits."""
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 70},
    "all": {"sliding_window": 300, "softcap": 3.0, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def check(found, expected, _padding=None, tolerance=2e-5) -> None:
    """The same up to the order of additions."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("committed", [0, 63, 64, 256, 300])
def test_chains_and_trees_see_what_the_reference_sees(committed):
    """Several splits, items for each and one for all, earlier scratch, padding."""
    case = Case(geometry(), ordered=True)
    segments = [
        tree(case.sequence(committed), 9),
        chain(case.sequence(committed), 20),
        tree(case.sequence(62, earlier=[-1, 0, 0]), 5),
        chain(case.sequence(126, earlier=[-1, 0]), 1),
    ]
    found, expected, padding = case.attend(segments, padding=5, items=2)
    check(found, expected)
    assert not padding.any()


@pytest.mark.parametrize(("window", "committed"), [(1, 0), (7, 30), (64, 150), (100, 300), (1000, 30)])
def test_a_sliding_window_counts_positions(window, committed):
    """Splits that no row sees are empty."""
    case = Case(geometry(), ordered=True)
    segments = [tree(case.sequence(committed, earlier=[-1, 0, 1, 2]), 12), chain(case.sequence(committed), 5)]
    check(*case.attend(segments, sliding_window=window))


@pytest.mark.parametrize("items", [0, 8])
def test_softcap_sinks_and_scale(items):
    """A sink counts once, however many splits a text has and whoever joins them."""
    case = Case(geometry(), ordered=True)
    segments = [tree(case.sequence(300), 5), chain(case.sequence(2), 4)]
    check(*case.attend(segments, items=items, scaling=0.4, **OPTIONS["all"]))


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (71, 1)])
@pytest.mark.parametrize("widths", [(24, 24), (32, 16)])
def test_any_number_and_width_of_heads(heads, widths):
    """Tiles of sixteen tokens, of two and of one."""
    case = Case(geometry(*heads, *widths), ordered=True)
    check(*case.attend([tree(case.sequence(66), 20), chain(case.sequence(2), 4)]))


class Texts:
    """Keys, values and queries by token, so that a text has the same ones wherever it stands."""

    def __init__(
        self,
        shape: Geometry,
        dtype: torch.dtype = torch.float32,
        page: int = PAGE,
        planned: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        widths = [(shape.query_heads, shape.head_dim), *[(shape.kv_heads, shape.head_dim)] * 2]
        tokens = TEXT + DECOYS
        self.rows = [torch.randn(tokens, *each, generator=generator).to(dtype) for each in widths]
        self.pool = PagePool(2 * SLOTS // page, page)
        self.pool.allocate(3)
        self.attention = KernelAttention(shape, 2 * SLOTS, page, dtype, CPU, ordered=True, planned=planned)
        self.planned = planned or shape.queries_per_kv
        self.shape, self.page = shape, page

    def sequence(self, committed: int) -> SequenceKv:
        """The first tokens of the text, committed."""
        kv = SequenceKv.open(self.pool, [])
        self.grow(kv, list(range(committed)), None)
        slots = torch.from_numpy(kv.slots[:committed])
        self.attention.keys[0, slots], self.attention.values[0, slots] = (
            rows[:committed] for rows in self.rows[1:]
        )
        kv.commit(range(committed), range(committed))
        return kv

    def grow(self, kv: SequenceKv, tokens: list[int], parents: list[int] | None) -> Segment:
        """New tokens of a sequence."""
        kv.reserve(len(tokens))
        kv.append(tokens, parents)
        return Segment(kv, tokens, parents, range(len(tokens)))

    def attend(self, *segments: Segment, room: int = 100, padding: int = 0, **options) -> list[torch.Tensor]:
        """What the segments' tokens see, [tokens, Q * D] each."""
        tokens = [token for segment in segments for token in segment.tokens]
        settings = PlanSettings(self.planned, self.page, self.attention.trash, room, ordered=True)
        plan = plan_in_order(segments, len(tokens) + padding, settings)
        layout = BufferLayout(graph_capacity(len(tokens) + padding, settings))
        buffer = torch.from_numpy(fill(plan, layout, segments, [], settings))
        self.attention.step = self.attention.open_step(buffer, layout, 1)
        padded = tokens + [0] * padding
        query, key, value = (rows[padded] for rows in self.rows)
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        layer = torch.nn.Module()
        layer.layer_idx = 0
        found = self.attention.attend(layer, *parts, None, **options)[0][0, : len(tokens)].flatten(1)
        return list(found.split([len(segment.tokens) for segment in segments]))

    def alone(self, committed: int, **options) -> torch.Tensor:
        """[NEW, Q * D]: the tokens behind a context one by one, each split of it an item."""
        rows = []
        for token in range(committed, committed + NEW):
            kv = self.sequence(token)
            rows += self.attend(self.grow(kv, [token], None), **options)
            kv.release()
        return torch.cat(rows)

    def branching(self, committed: int) -> tuple[Segment, list[int]]:
        """A tree with decoys in which the next tokens of the text are a path, and their offsets."""
        tokens, parents, path = [TEXT], [-1], []
        for index in range(NEW):
            parents.append(path[-1] if path else -1)
            tokens.append(committed + index)
            path.append(len(tokens) - 1)
            tokens += [TEXT + 2 * index + 1, TEXT + 2 * index + 2]
            parents += [path[-1], len(tokens) - 2]
        return self.grow(self.sequence(committed), tokens, parents), path


@pytest.mark.parametrize(
    ("committed", "options"),
    [
        *((0, "plain"), (254, "plain"), (62, "window"), (254, "all")),
        *(pytest.param(edge, "plain", marks=pytest.mark.slow) for edge in EDGES),
        pytest.param(600, "window", marks=pytest.mark.slow),
    ],
)
def test_any_way_of_computing_gives_the_same_bits(committed, options):
    """Chunks and trees, alone and in a batch with padding, by programs that join splits or by the next
    launch.
    """
    texts, options = Texts(geometry()), OPTIONS[options]
    expected = texts.alone(committed, **options)
    new = list(range(committed, committed + NEW))
    chunk = texts.grow(texts.sequence(committed), new, None)
    branches, path = texts.branching(committed)
    other = texts.grow(texts.sequence(333), list(range(333, 340)), None)
    for room, padding in ((100, 0), (1, 3)):
        first, _, second = texts.attend(chunk, other, branches, room=room, padding=padding, **options)
        assert torch.equal(first, expected), room
        assert torch.equal(second[path], expected), room
    for segment in (chunk, branches):
        (found,) = texts.attend(segment, **options)
        assert torch.equal(found[path if segment is branches else ...], expected)


@pytest.mark.parametrize("page", [1, 7, 16, 64])
def test_pages_of_any_size_give_the_same_bits(page):
    """They say where an entry is, not when it is added."""
    texts = Texts(geometry(), page=page)
    branches, path = texts.branching(254)
    assert torch.equal(texts.attend(branches)[0][path], Texts(geometry()).alone(254))


@pytest.mark.parametrize("committed", [250, 300])
def test_committed_nodes_count_as_they_did_in_the_tree(committed):
    """A commit moves them; survivors stay a tree."""
    texts = Texts(geometry())
    expected = texts.alone(committed)
    branches, path = texts.branching(committed)
    texts.attend(branches)
    kv = branches.kv
    moves = kv.commit(path[:2], [committed, committed + 1], survivors=[path[1] + 1, *path[2:4]])
    texts.attention.move(moves)
    (found,) = texts.attend(texts.grow(kv, [TEXT, committed + 4], [-1, 2]))
    assert torch.equal(found[1], expected[4])
    kv.rollback()
    (found,) = texts.attend(texts.grow(kv, [committed + 2, committed + 3], None))
    assert torch.equal(found, expected[2:4])


@pytest.mark.parametrize("committed", [126, 254, pytest.param(510, marks=pytest.mark.slow)])
def test_splits_of_long_texts_are_longer_and_give_the_same_bits(monkeypatch, committed):
    """A chunk and a tree over the edge from which on they are."""
    monkeypatch.setattr(ordered_plan, "SPLIT", 64)
    monkeypatch.setattr(ordered_plan, "MAX_SPLITS", 2)
    texts = Texts(geometry())
    expected = texts.alone(committed)
    chunk = texts.grow(texts.sequence(committed), list(range(committed, committed + NEW)), None)
    branches, path = texts.branching(committed)
    first, second = texts.attend(chunk, branches, room=3)
    assert torch.equal(first, expected)
    assert torch.equal(second[path], expected)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (71, 1)])
def test_bfloat16_in_groups_of_any_size(heads):
    """Where sixteen tokens share a tile, where two do, and where each has one."""
    texts = Texts(geometry(*heads), torch.bfloat16)
    branches, path = texts.branching(300)
    assert torch.equal(texts.attend(branches, room=0)[0][path], texts.alone(300))


@pytest.mark.parametrize("planned", [1, 2, 4])
def test_tiles_that_other_layers_plan_give_the_same_bits(planned):
    """Heads of 320 columns, eight for one kv head, of which tiles of 16, 8 and 4 tokens take a part."""
    texts = Texts(geometry(8, 1, 320, 320), planned=planned)
    branches, path = texts.branching(254)
    expected = texts.alone(254)
    assert torch.equal(texts.attend(branches, room=0)[0][path], expected)
    case = Case(texts.shape, ordered=True, planned=planned)
    check(*case.attend([tree(case.sequence(66), 20), chain(case.sequence(2), 4)]))


def test_a_plan_is_cut_where_splits_become_longer():
    """Of 300 k tokens there are still at most 32."""
    sizes = [ordered_plan.split_at(position) for position in (0, 8191, 8192, 16383, 16384, 131071)]
    assert sizes == [256, 256, 512, 512, 1024, 4096]
    for position in (8191, 8192, 300_000, 131_072):
        assert -(-(position + 1) // ordered_plan.split_at(position)) <= ordered_plan.MAX_SPLITS
