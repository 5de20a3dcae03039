"""What a step gives the device to do: launches, copies, waits, and what the host does for it.

Figures stand here so that they cannot grow unseen. A change that lowers one lowers it here too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.engine.gpu.layout import BufferLayout
from outrider.engine.gpu.ordered_plan import plan_in_order
from outrider.engine.gpu.plan import AttentionPlan, PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.runner import Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser, on_device, perturbed
from outrider.sampling.chooser import SamplingRow, choose, rank
from outrider.sampling.history import History
from outrider.sampling.replays import Replays
from tests.unit.engine.gpu.shapes_of_models import FAMILIES, LLAMA_8B, MIXED, MIXTURES, model, model_of
from tests.unit.engine.gpu.stand_in import DEVICE, Work, counted

LAYERS = 2
PER_LAYER = {
    "add_norm_kernel": 2,
    "rotation_kernel": 1,
    "attend_kernel": 1,
    "combine_kernel": 1,
    "activation_kernel": 1,
}
"""Beside four products."""
MOVING = Counter(move_kernel=2)
"""Of keys and of values, once a step."""
VOCABULARY = 128256


class CountedGraphs:
    """A replay computes nothing, and is counted."""

    def __init__(self) -> None:
        self.replayed = 0
        self.captured: list[Work] = []
        """What each replay would launch."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Graphs."""
        with counted() as work:
            result = run()
        self.captured.append(work)

        def replay() -> Tensor:
            self.replayed += 1
            return result

        return replay


@pytest.fixture(scope="module")
def decoder():
    """A model with the shape of Llama 3 8B, of two layers."""
    return model(LLAMA_8B, LAYERS)


@pytest.fixture
def on_kernels(monkeypatch):
    """Choices are made where a GPU makes them; what is uploaded once is there."""
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    on_device._tables(DEVICE)
    perturbed._grid(DEVICE)


def prompt(runner: GraphRunner, tokens: int = 40) -> SequenceKv:
    """A sequence with so many committed tokens."""
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, [1] * tokens, None, [tokens - 1])])
    runner.commit(kv, range(tokens), [1] * tokens)
    return kv


def rows_of(params: SamplingParams, count: int) -> list[SamplingRow]:
    """A row at each of some positions."""
    return [SamplingRow(params, 10 + index, index, History([])) for index in range(count)]


def test_a_forward_is_ten_launches_a_layer(decoder):
    """Six kernels and four products; beside them rotation angles, moves, embedding, the wanted rows, the last
    norm and the output layer.
    """
    runner = GraphRunner(decoder, 100, 16, buckets=())
    with counted() as work:
        prompt(runner)
    kernels = MOVING + Counter({name: LAYERS * each for name, each in PER_LAYER.items()})
    kernels["add_norm_kernel"] += 1
    assert work.kernels == kernels
    assert work.operations["mm"] == 4 * LAYERS + 1
    assert work.launches == 10 * LAYERS + 12
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


def test_one_token_is_seven_launches_a_layer(decoder):
    """Norms, gate and residuals are parts of the products; the rows of the embedding are the wanted rows."""
    runner = GraphRunner(decoder, 100, 16, buckets=())
    with counted() as work:
        prompt(runner, 1)
    kernels = MOVING + Counter(dict.fromkeys(("rotation_kernel", "attend_kernel", "combine_kernel"), LAYERS))
    assert work.kernels == kernels + Counter(one_row_kernel=4 * LAYERS + 1)
    assert work.launches == 7 * LAYERS + 9
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


@pytest.mark.parametrize(
    ("family", "norms", "additions"),
    [
        *[("gpt_neox", 2, 1), ("gpt2", 2, 0), ("olmo2", 4, 2)],
        *[("phi", 2, 1), ("starcoder2", 2, 0), ("gemma3", 4, 0)],
    ],
)
def test_other_families_take_so_many_launches(family, norms, additions):
    """Residuals are added by launches of their own where the MLP stands beside attention or no norm follows;
    OLMo 2 also has norms of queries and keys; GPT-2 embeds positions, Gemma scales its embedding.
    """
    runner = GraphRunner(model_of(FAMILIES[family](LAYERS)), 100, 16, buckets=())
    with counted() as work:
        prompt(runner)
    kernels = MOVING + Counter({name: LAYERS * each for name, each in PER_LAYER.items()})
    kernels["add_norm_kernel"] = LAYERS * norms + 1
    assert work.kernels == kernels
    assert work.operations["mm"] + work.operations["addmm"] == 4 * LAYERS + 1
    others = {"gpt2": 2, "olmo2": -1, "gemma3": 1}  # the last norm adds what OLMo 2's layers would
    assert work.launches == (8 + norms + additions) * LAYERS + 12 + others.get(family, 0)
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


@pytest.mark.parametrize(("family", "launches"), [("gemma4_dense", 77), ("gemma4", 106)])
def test_layers_that_differ_take_so_many_launches(family, launches):
    """Norms of values are in the rotation's launch, and entries move in two parts. A layer has a factor, and
    perhaps inputs of its own: two products, an activation, and a norm.
    """
    runner = GraphRunner(model_of(MIXED[family]), 100, 16, buckets=())
    with counted() as work:
        prompt(runner)
    kernels = MOVING + MOVING + Counter({name: 4 * each for name, each in PER_LAYER.items()})
    kernels["add_norm_kernel"] = 4 * 4 + 1
    if family == "gemma4":
        kernels += Counter(add_norm_kernel=4 + 1, activation_kernel=4)
    assert work.kernels == kernels
    assert work.launches == launches
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


EXPERTS = {"choose_kernel": 1, "arrange_kernel": 1, "expert_product_kernel": 2, "expert_sum_kernel": 1}
"""Launches of a layer in place of two products."""


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_fourteen_launches_a_layer(family, tokens):
    """Seven in place of an MLP's three, of which the router has two: the host waits for no choice.

    gpt-oss stretches its rotations, once for all layers.
    """
    runner = GraphRunner(model_of(MIXTURES[family](LAYERS)), 100, 16, buckets=())
    with counted() as work:
        prompt(runner, tokens)
    gate = {"bounded_gate_kernel": 1, "activation_kernel": 0} if family == "gpt_oss" else {}
    kernels = Counter({name: LAYERS * each for name, each in (PER_LAYER | EXPERTS | gate).items()})
    kernels += MOVING + Counter(add_norm_kernel=1)
    assert work.kernels == kernels
    assert work.launches == 14 * LAYERS + 12 + 2 * (family == "gpt_oss")
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_codes_are_one_launch_each(bits):
    """The forward has as many launches as with the products of torch, and nothing else is done."""
    runner = GraphRunner(model(LLAMA_8B, LAYERS, bits=bits), 100, 16, buckets=())
    with counted() as work:
        prompt(runner)
    assert work.kernels["coded_product_kernel"] == 4 * LAYERS + 1
    assert work.operations["mm"] == 0
    assert work.launches == 10 * LAYERS + 12
    assert (work.sent, work.waits, work.on_host) == (1, 0, 0)


def test_deterministic_takes_as_many_launches():
    """Kernels of the project in place of the library's products, and another for attention."""
    runner = GraphRunner(model(LLAMA_8B, LAYERS, ordered=True), 100, 16, buckets=())
    with counted() as work:
        prompt(runner)
    kernels = MOVING + Counter({name: LAYERS * each for name, each in PER_LAYER.items()})
    kernels["add_norm_kernel"] += 1
    kernels["attend_in_order_kernel"] = kernels.pop("attend_kernel")
    kernels["product_kernel"] = 4 * LAYERS + 1
    assert work.kernels == kernels
    assert work.operations["mm"] == 0
    assert work.launches == 10 * LAYERS + 12


@pytest.mark.parametrize(
    ("family", "launches"),
    [
        *[
            ("mixtral", {14 * LAYERS + 12}),
            ("qwen3_moe", {14 * LAYERS + 12}),
            ("gpt_oss", {14 * LAYERS + 14}),
        ],
        (None, {7 * LAYERS + 9, 10 * LAYERS + 12}),
    ],
)
def test_a_step_with_a_graph_is_one_copy_and_one_replay(decoder, family, launches):
    """A tree of 33 tokens after a commit that moves entries: no launch beside the copy of the logits.

    The graph leaves them in the room of all graphs. So is a step of a model with experts.
    """
    decoder = decoder if family is None else model_of(MIXTURES[family](LAYERS))
    graphs = CountedGraphs()
    with counted():
        runner = GraphRunner(decoder, 100, 16, buckets=(1, 40), graphs=graphs)
        kv = prompt(runner, 48)
        runner.forward([Segment(kv, [5, 6, 7], [-1, -1, 1], range(3))])
        runner.commit(kv, [1], [6])
    before = graphs.replayed
    with counted() as work:
        runner.forward([Segment(kv, [9] * 32, [(index - 1) // 2 for index in range(32)], range(32))])
    assert graphs.replayed == before + 1
    assert {captured.launches for captured in graphs.captured} == launches
    assert work == Work(operations=Counter({"_to_copy": 1}), sent=1)


@pytest.mark.parametrize(
    ("params", "choices", "rankings"),
    [
        (SamplingParams(), 6, 15),
        (SamplingParams(temperature=0.7, seed=1), 12, 36),
        (SamplingParams(temperature=0.7, seed=1, top_p=0.9), 90, 100),
    ],
)
def test_choices_and_rankings_take_so_many_launches(on_kernels, params, choices, rankings):
    """Of any number of rows, with one read. Four launches tell whether the tokens have numbers, and one
    replaces NaN.
    """
    logits = torch.empty((8, VOCABULARY), device=DEVICE)
    with counted() as chosen:
        choose(logits, rows_of(params, 8), ())
    with counted() as ranked:
        rank(logits, rows_of(params, 8), 8, 1.0, ())
    assert (chosen.waits, ranked.waits) == (1, 1)
    assert chosen.sent <= 1
    assert ranked.sent == 1
    assert (chosen.launches, ranked.launches) == (choices, rankings)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, seed=1, top_p=0.9)], ids=["greedy", "top-p"]
)
def test_a_ranking_with_a_graph_is_two_copies_and_one_replay(on_kernels, monkeypatch, params):
    """The logits of 6 rows and the table of their draws; then the result is read."""
    graphs = CountedGraphs()
    with counted():
        replays = Replays(graphs, VOCABULARY, DEVICE)
        monkeypatch.setattr(on_device, "_replays", lambda device, size: replays)
        rank(torch.empty((8, VOCABULARY), device=DEVICE), rows_of(params, 8), 8, 1.0, ())
    logits = torch.empty((6, VOCABULARY), device=DEVICE)
    with counted() as work:
        rank(logits, rows_of(params, 6), 8, 1.0, ())
    assert graphs.replayed == 2
    assert (work.sent, work.waits, work.launches) == (1, 1, 1)
    assert work.operations == Counter({"copy_": 1})


def test_rows_with_penalties_do_not_slow_the_others(on_kernels):
    """They are changed by launches of their own, and the batch is chosen as ever, with one wait."""
    logits = torch.empty((8, VOCABULARY), device=DEVICE)
    plain, penalised = SamplingParams(temperature=0.7, seed=1), SamplingParams(seed=1, presence_penalty=0.5)
    rows = [SamplingRow(plain, 10, 0, History([]))] * 7 + [SamplingRow(penalised, 10, 0, History([5, 6]))]
    with counted() as work:
        choose(logits, rows, ())
    assert work.kernels == Counter({"peaks_kernel": 1})
    assert work.waits == 1
    assert work.launches <= 50


def test_a_decoding_step_waits_once(decoder, on_kernels):
    """Forward, choice and commit of several sessions: the host waits for the tokens alone."""
    with counted():
        runner = GraphRunner(decoder, 100, 16, buckets=(8,), graphs=CountedGraphs())
        sequences = [prompt(runner, 20) for _ in range(4)]
    with counted() as work:
        logits = runner.forward([Segment(kv, [3], None, [0]) for kv in sequences])
        tokens = choose(logits, rows_of(SamplingParams(temperature=0.7, seed=1), 4), ())
        for kv in sequences:
            runner.commit(kv, [0], [3])
    assert len(tokens) == len(sequences)
    assert (work.sent, work.waits, work.launches) == (2, 1, 13)


@pytest.mark.parametrize(
    ("sessions", "nodes", "most"), [(1, 0, 110), (1, 32, 200), (32, 0, 1250), (32, 3, 1800)]
)
def test_packing_a_step_takes_so_many_calls(sessions, nodes, most):
    """Calls of functions, Python's and C's, from the segments to the words: what the host's time goes to."""
    settings = PlanSettings(4, 16, 10**6, 33)
    assert packing_calls(sessions, nodes, plan_tiles, settings) <= most


@pytest.mark.parametrize(("sessions", "nodes", "most"), [(1, 0, 115), (1, 32, 325), (32, 3, 3050)])
def test_packing_with_deterministic_takes_so_many_calls(sessions, nodes, most):
    """A few more: the lengths of splits are asked for by token."""
    settings = PlanSettings(4, 16, 10**6, 128, ordered=True)
    assert packing_calls(sessions, nodes, plan_in_order, settings) <= most


def packing_calls(
    sessions: int, nodes: int, plan: Callable[..., AttentionPlan], settings: PlanSettings
) -> int:
    """Calls for so many sessions with a token and so many candidates each."""
    pool, segments = PagePool(sessions * 20, 16), []
    for _ in range(sessions):
        kv = SequenceKv.open(pool, [])
        kv.reserve(256)
        kv.append([1] * 256, None)
        kv.commit(range(256), [1] * 256)
        parents = [-1, *((index - 1) // 2 for index in range(1, 1 + nodes))]
        kv.reserve(1 + nodes)
        segments.append(Segment(kv, [2] * (1 + nodes), parents, range(1 + nodes)))
        kv.append(segments[-1].tokens, parents)
    tokens = sessions * (1 + nodes)
    layout = BufferLayout(graph_capacity(tokens, settings))
    return count_calls(lambda: fill(plan(segments, tokens, settings), layout, segments, [], settings))


def count_calls(run: Callable[[], object]) -> int:
    """How many functions are called meanwhile."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
