"""The runner with graphs and kernels against the plain one, on the CPU, with fake graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from outrider.engine.fused_decoder import NotFused
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading import loader
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model
from tests.unit.engine.gpu.architectures import LAYERS, ON_KERNELS
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.gpu.test_one_row import few_programs

PAGES, PAGE = 48, 4
TOKENS = [(7 * i + 3) % 290 for i in range(60)]
BUCKETS = (4, 8)
QUICK = (
    *("llama", "qwen3", "mistral", "gemma2", "gpt2", "olmo2", "phi"),
    *("starcoder2", "mixtral", "qwen3_moe", "glm4"),
)
"""Interpreting takes time. Each of these has something of its own; the others join such parts."""
ARCHITECTURES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ON_KERNELS]


@pytest.fixture
def little_padding(monkeypatch):
    """Interpreting takes time."""
    monkeypatch.setattr("outrider.engine.gpu.runner.EAGER_MULTIPLE", 4)


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory):
    """A tiny model in float32 by architecture as a GPU has it: with the linear layers of torch."""

    @cache
    def load(architecture):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "pack_linears", lambda *_: 0)
            layers, place = LAYERS.get(architecture, 1), tmp_path_factory.mktemp(architecture)
            folder = build_model(architecture, place, num_hidden_layers=layers)
            return loader.load_model(str(folder), dtype="float32", device="cpu", threads=1)

    return load


@pytest.fixture(scope="module")
def logits_of(loaded_of):
    """All logits of the script by architecture, through kernels and graphs, and how often graphs ran."""

    @cache
    def run(architecture):
        graphs = FakeGraphs()
        runner = GraphRunner(loaded_of(architecture), PAGES, PAGE, buckets=BUCKETS, graphs=graphs)
        return script(runner), (graphs.captured, graphs.replayed)

    return run


def script(runner: ModelRunner) -> list[torch.Tensor]:
    """Prefill in two chunks, a tree, a commit that moves entries, survivors, a fork, a batch; all logits."""
    kv, other = (SequenceKv.open(runner.pool, []) for _ in range(2))
    results = [runner.forward([Segment(kv, TOKENS[:13], None, [12])])]
    results.append(runner.forward([Segment(kv, TOKENS[13:16], None, range(3))]))
    runner.commit(kv, range(16), TOKENS[:16])
    branches = [5, 6, 7, 8, 9, 10, 11]
    parents = [-1, -1, 1, 1, 3, 3, 5]
    results.append(runner.forward([Segment(kv, branches, parents, range(7))]))
    runner.commit(kv, [1, 3], [6, 8], survivors=[4, 5, 6])
    results.append(runner.forward([Segment(kv, [12], [2], [0]), Segment(other, TOKENS[:7], None, [6, 3])]))
    runner.commit(kv, [1], [10], survivors=[2, 3])
    runner.commit(other, range(7), TOKENS[:7])
    copy = runner.fork(other)
    kv.rollback()
    batch = [Segment(copy, [4, 5], None, [0, 1]), Segment(kv, [9], None, [0]), Segment(other, [4], None, [0])]
    results.append(runner.forward(batch))
    for sequence in (kv, other, copy):
        sequence.release()
    return results


def prompt(runner: ModelRunner, tokens: int = 3) -> torch.Tensor:
    """Logits of one short step."""
    kv = SequenceKv.open(runner.pool, [])
    return runner.forward([Segment(kv, TOKENS[:tokens], None, [1, 2])])


@pytest.mark.usefixtures("little_padding")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_plain_runner(loaded_of, logits_of, architecture):
    """Lean models and others, windows, softcap, sinks, experts, heads that differ between layers: the same
    logits from kernels and graphs.
    """
    found, graphs = logits_of(architecture)
    for ours, theirs in zip(found, script(ModelRunner(loaded_of(architecture), PAGES, PAGE)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert graphs == (2, 4), "the first chunk alone is longer than any bucket"


def test_what_no_kernel_computes_is_refused(loaded_of, monkeypatch):
    """The loader then looks for another way to run the model."""
    layer = loaded_of("llama").model.stack[0]
    monkeypatch.setattr(layer, "settings", replace(layer.settings, latent=True))
    with pytest.raises(NotFused, match="no kernel attends to latents"):
        GraphRunner(loaded_of("llama"), PAGES, PAGE, buckets=())


def test_a_model_that_was_packed_for_the_cpu_runs_too(pair_of):
    """A gate is as wide whether a kernel, a packed product or torch opens it."""
    loaded = pair_of("llama").loaded
    found, expected = (
        prompt(GraphRunner(loaded, PAGES, PAGE, buckets=())),
        prompt(ModelRunner(loaded, PAGES, PAGE)),
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("little_padding")
def test_graphs_change_nothing(loaded_of, logits_of):
    """Without a bucket every step runs eagerly, to the same logits."""
    eager = script(GraphRunner(loaded_of("llama"), PAGES, PAGE, buckets=()))
    for ours, theirs in zip(logits_of("llama")[0], eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "ministral3"])
def test_tokens_one_by_one_have_the_logits_of_the_plain_runner(loaded_of, architecture, monkeypatch):
    """By the forward of one token, with a graph and without; also where nobody wants its logits."""
    few_programs(monkeypatch)
    loaded, graphs = loaded_of(architecture), FakeGraphs()
    expected = one_by_one(ModelRunner(loaded, PAGES, PAGE))
    for runner in (
        GraphRunner(loaded, PAGES, PAGE, buckets=(1,), graphs=graphs),
        GraphRunner(loaded, PAGES, PAGE, buckets=()),
    ):
        assert runner.has_forward_of_one
        torch.testing.assert_close(one_by_one(runner), expected, rtol=1e-3, atol=1e-3)
    assert graphs.replayed == 4


def one_by_one(runner: ModelRunner) -> torch.Tensor:
    """The logits of four tokens that follow each other, without those of the second."""
    kv = SequenceKv.open(runner.pool, [])
    wanted = ([0], [], [0], [0])
    logits = [runner.forward([Segment(kv, TOKENS[i : i + 1], None, rows)]) for i, rows in enumerate(wanted)]
    assert [len(rows) for rows in logits] == [1, 0, 1, 1]
    return torch.cat(logits)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "olmo2", "granite", "mixtral", "phi"])
def test_other_layers_have_no_forward_of_their_own_for_one_token(loaded_of, architecture):
    """Norms behind attention, norms with a bias, factors, experts, an MLP beside attention."""
    assert not GraphRunner(loaded_of(architecture), PAGES, PAGE, buckets=()).has_forward_of_one


def test_results_outlive_the_next_step(loaded_of):
    """Logits are the caller's: the next replay of the same graph leaves them alone."""
    runner = GraphRunner(loaded_of("llama"), PAGES, PAGE, buckets=(4,), graphs=FakeGraphs())
    kv = SequenceKv.open(runner.pool, [])
    first = runner.forward([Segment(kv, [1, 2], None, [1])])
    kept = first.clone()
    runner.forward([Segment(kv, [3, 4], None, [1])])
    assert torch.equal(first, kept)


def test_a_tail_too_long_for_the_graphs_runs_without_one(loaded_of, monkeypatch):
    """A step whose page tables do not fit the graphs' buffer still runs."""
    monkeypatch.setattr("outrider.engine.gpu.runner.TAIL_WORDS", 0)
    loaded = loaded_of("llama")
    graphs = FakeGraphs()
    found = prompt(GraphRunner(loaded, PAGES, PAGE, buckets=(4,), graphs=graphs))
    torch.testing.assert_close(found, prompt(ModelRunner(loaded, PAGES, PAGE)), rtol=1e-3, atol=1e-3)
    assert graphs.replayed == 0


def test_a_forward_that_cannot_be_captured_runs_without_graphs(loaded_of):
    """The reason is said, and steps run eagerly."""

    class Refusing:
        def capture(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    said: list[str] = []
    loaded = loaded_of("llama")
    found = prompt(GraphRunner(loaded, PAGES, PAGE, buckets=(8,), graphs=Refusing(), say=said.append))
    torch.testing.assert_close(found, prompt(ModelRunner(loaded, PAGES, PAGE)), rtol=1e-3, atol=1e-3)
    assert "not permitted" in said[-1]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_graphs_that_find_no_memory_are_left_out(loaded_of, error):
    """In torch's allocator or where CUDA itself keeps a graph. The smaller ones serve; a step of the missing
    size runs eagerly, to the same logits.
    """

    class Crowded(FakeGraphs):
        def capture(self, run):
            if run().shape[0] > 4:
                raise error
            return super().capture(run)

    said: list[str] = []
    loaded, graphs = loaded_of("llama"), Crowded()
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=(4, 8), graphs=graphs, say=said.append)
    for tokens in (4, 5):
        found, expected = (prompt(each, tokens) for each in (runner, ModelRunner(loaded, PAGES, PAGE)))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (graphs.captured, graphs.replayed, list(runner.row_edges)) == (1, 1, [4])
    assert "steps of 8 tokens run without a graph" in said[1]
    assert said[-1] == "1 graphs captured; they hold 0 MiB"


def test_graphs_share_the_room_for_their_logits(loaded_of):
    """Each size leaves its rows at the front of the largest one's."""
    results = []

    class Noting(FakeGraphs):
        def capture(self, run):
            results.append(run())
            return super().capture(run)

    GraphRunner(loaded_of("llama"), PAGES, PAGE, buckets=(2, 4, 8), max_rows=4, graphs=Noting())
    assert [len(result) for result in results] == [4, 4, 2]
    assert len({result.data_ptr() for result in results}) == 1


@pytest.mark.parametrize(("wanted", "replayed"), [(1, 0), (4, 1), (5, 0)])
def test_a_graph_computes_few_rows_that_nobody_wants(loaded_of, monkeypatch, wanted, replayed):
    """Of 4 rows all but 3 have to be wanted here, and a step that wants more than there are runs eagerly."""
    monkeypatch.setattr("outrider.engine.gpu.runner.MAX_UNWANTED", 2)
    loaded, graphs = loaded_of("llama"), FakeGraphs()
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=(8,), max_rows=4, graphs=graphs)
    logits = []
    for each in (runner, ModelRunner(loaded, PAGES, PAGE)):
        kv = SequenceKv.open(each.pool, [])
        logits.append(each.forward([Segment(kv, TOKENS[:6], None, range(6 - wanted, 6))]))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    assert graphs.replayed == replayed


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_what_goes_into_layers_is_taken_without_a_graph(loaded_of, architecture):
    """The rows are those of the plain runner, and the steps after it have their graphs again."""
    loaded, graphs, found = loaded_of(architecture), FakeGraphs(), []
    graphed = partial(GraphRunner, buckets=(4,), graphs=graphs)
    for make in (graphed, ModelRunner):
        runner = make(loaded, PAGES, PAGE)
        kv, other = (SequenceKv.open(runner.pool, []) for _ in range(2))
        segments = [
            Segment(kv, TOKENS[:3], None, [2], [1, 2]),
            Segment(other, [5, 6, 7], [-1, 0, 0], [0], [0, 2]),
        ]
        layers = (0, 1, loaded.num_layers)
        logits, taken = runner.forward_with_features(segments, layers)
        found.append(
            (logits, *(taken[layer] for layer in layers), runner.forward([Segment(kv, [9], None, [0])]))
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert graphs.replayed == 1
