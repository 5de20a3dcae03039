"""The runner with CUDA graphs against the same forward without them, and against plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from tests.unit.engine.reading import VOCABULARY, Target, read_all, token_by_token

PAGES, PAGE = 64, 16
PROMPT = [(7 * i + 3) % 290 for i in range(200)]


class Uncaptured:
    """The same padded forward, launched kernel by kernel."""

    def capture(self, run):
        """See `outrider.engine.gpu.graphs.Graphs`: the first call is the largest step's."""
        run()
        return run


def decode(runner: ModelRunner, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after the prompt, and the logits of a tree below them."""
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, PROMPT, None, [len(PROMPT) - 1])])
    runner.commit(kv, range(len(PROMPT)), PROMPT)
    tokens = logits.argmax(-1).tolist()
    for _ in range(count):
        logits = runner.forward([Segment(kv, tokens[-1:], None, [0])])
        runner.commit(kv, [0], tokens[-1:])
        tokens += logits.argmax(-1).tolist()
    runner.forward([Segment(kv, [5, 6, 7, 8], [-1, -1, 1, 2], range(4))])
    runner.commit(kv, [1, 2], [6, 7], survivors=[3])
    return tokens, runner.forward([Segment(kv, [9], [0], [0])])


def test_graphs_give_the_tokens_of_the_eager_forward(loaded):
    """Equal logits, not close ones: the same kernels on the same shapes."""
    from outrider.engine.gpu.runner import GraphRunner

    graphs = decode(GraphRunner(loaded, PAGES, PAGE), 20)
    eager = decode(GraphRunner(loaded, PAGES, PAGE, graphs=Uncaptured()), 20)
    assert graphs[0] == eager[0]
    assert torch.equal(graphs[1], eager[1])


def test_logits_are_near_those_of_plain_torch(loaded):
    """Kernels and graphs against the reference attention on the same device."""
    from outrider.engine.gpu.runner import GraphRunner

    _, found = decode(GraphRunner(loaded, PAGES, PAGE), 0)
    _, expected = decode(ModelRunner(loaded, PAGES, PAGE), 0)
    spread = (expected - expected.mean()).norm()
    assert float((found - expected).norm() / spread) < 0.05


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_model_runs_from_codes(device, tmp_path, weights):
    """It passes the check at load, on the kernels; graphs give the bits of the eager forward."""
    from outrider.engine.gpu.coded_linear import CodedLinear
    from outrider.engine.gpu.runner import GraphRunner
    from outrider.engine.loading.loader import load_model
    from tests.models import build_model

    folder = str(build_model("llama", tmp_path))
    loaded = load_model(folder, dtype="bfloat16", device=str(device), threads=1, weights=weights)
    assert loaded.kernels
    assert sum(isinstance(layer, CodedLinear) for layer in loaded.model.modules()) == 3 * 4 + 1
    graphs = decode(GraphRunner(loaded, PAGES, PAGE), 20)
    eager = decode(GraphRunner(loaded, PAGES, PAGE, graphs=Uncaptured()), 20)
    assert graphs[0] == eager[0]
    assert torch.equal(graphs[1], eager[1])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_model_with_experts_runs_in_graphs(device, tmp_path, architecture):
    """Its forward waits for nothing, so it is captured, and graphs give the bits of the eager forward."""
    from outrider.engine.gpu.runner import GraphRunner
    from outrider.engine.loading.loader import load_model
    from tests.models import build_model

    folder = str(build_model(architecture, tmp_path))
    loaded = load_model(folder, dtype="bfloat16", device=str(device), threads=1)
    said: list[str] = []
    graphs = decode(GraphRunner(loaded, PAGES, PAGE, say=said.append), 20)
    assert "graphs captured" in said[-1]
    eager = decode(GraphRunner(loaded, PAGES, PAGE, graphs=Uncaptured()), 20)
    assert graphs[0] == eager[0]
    assert torch.equal(graphs[1], eager[1])


def test_a_bf16_model_gets_the_graph_runner(loaded):
    """What the services ask for."""
    from outrider.engine.gpu.runner import GraphRunner
    from outrider.engine.make_runner import make_runner

    assert isinstance(make_runner(loaded, PAGES, PAGE), GraphRunner)


def test_deterministic_gives_the_same_bits_in_any_way(deterministic):
    """Chunks, trees, batches, graphs and reused prefixes against one token at a time."""
    from outrider.engine.gpu.runner import GraphRunner

    generator = random.Random(1)
    texts = [[generator.randrange(VOCABULARY) for _ in range(400)] for _ in range(2)]
    texts[1][:40] = texts[0][:40]
    alone = GraphRunner(deterministic, 8 * PAGES, PAGE)
    target = Target(deterministic, texts, [token_by_token(alone, text) for text in texts])
    for seed, page in enumerate((4, 16, 64)):
        read_all(target, GraphRunner(deterministic, 8 * PAGES, page), seed)
    read_all(target, GraphRunner(deterministic, 8 * PAGES, PAGE, buckets=()), 3)
