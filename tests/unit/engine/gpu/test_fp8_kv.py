"""Keys and values in 8 bits on the kernels, through Triton's interpreter, in all ways of computing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading import loader
from outrider.engine.loading.check_forward import check_paged, run_plain
from outrider.engine.loading.fp8_kv import RoundedCache
from outrider.engine.runner import Segment
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.messages import SamplingParams, VerifyPolicy
from tests.models import build_model
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.gpu.test_deterministic import plainly_loaded, shrink
from tests.unit.engine.gpu.test_one_row import few_programs
from tests.unit.engine.reading import Target, read_all, token_by_token
from tests.unit.verify_service.fakes import Bench, Clock, opening, text, verdicts
from tests.unit.verify_service.test_exactness import LARGE, propose
from verify_service.replica import layout_of

PAGES, PAGE = 100, 4
COUNT = 10
PROMPTS = [(5, 6, 7), tuple(range(50, 62)), (9, 8, 9, 8, 9, 8)]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=COUNT, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=7),
}


@pytest.fixture(scope="module", autouse=True)
def few():
    """Few programs compute a product of one row: interpreting takes time."""
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama."""
    return build_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def loaded(folder):
    """The same in float32, with such keys and values."""
    return replace(plainly_loaded(folder), kernels=True, fp8_kv=True)


def graphed(loaded) -> GraphRunner:
    """A runner with stand-in graphs for the smaller steps."""
    return GraphRunner(loaded, PAGES, PAGE, buckets=(1, 8), graphs=FakeGraphs())


@pytest.fixture(scope="module")
def truths(loaded):
    """What each prompt gets alone and without proposals."""
    return {(name, prompt): alone(loaded, name, prompt) for name in SAMPLINGS for prompt in PROMPTS}


def alone(loaded, name, prompt) -> list[int]:
    """One session without speculation."""
    bench = bench_of(loaded)
    stream = bench.open(opening(prompt, sampling=SAMPLINGS[name], policy=VerifyPolicy.OFF))
    bench.run()
    return text(verdicts(stream))


def bench_of(loaded) -> Bench:
    """The verify service's core around a new runner."""
    return Bench(graphed(loaded), limits=LARGE, max_step_tokens=64, clock=Clock(tick=1e-4))


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_tokens_are_those_of_transformers_with_such_a_cache(folder, truths, prompt):
    """Its own cache, but for the rounding of what is kept."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = network.generate(
        torch.tensor([prompt]),
        past_key_values=RoundedCache(config=network.config),
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
    )
    assert found[0, len(prompt) :].tolist() == truths["greedy", prompt]


@pytest.mark.parametrize("policy", [VerifyPolicy.PIPELINED, VerifyPolicy.SEQUENTIAL])
@pytest.mark.parametrize(("name", "kind"), [("greedy", "adversarial"), ("sampled", "perfect")])
def test_every_mode_commits_what_the_target_says_alone(loaded, truths, name, kind, policy):
    """Sessions side by side, whose candidates are right, wrong, and late."""
    bench, draw, first_id = bench_of(loaded), random.Random(11), 0
    streams = [bench.open(opening(each, sampling=SAMPLINGS[name], policy=policy)) for each in PROMPTS]
    for _ in range(500):
        bench.core.turn([])
        sessions = [(stream, bench.core.sessions[stream.id]) for stream in streams]
        for stream, session in sessions:
            if not session.finished:
                prompt = PROMPTS[stream.id - 1]
                full = [*prompt, *truths[name, prompt]]
                bench.propose(stream, propose(kind, draw, first_id, session.tree.committed, full))
                first_id += 20
        if all(session.finished for _, session in sessions):
            break
    assert [text(verdicts(stream)) for stream in streams] == [truths[name, each] for each in PROMPTS]


def test_deterministic_gives_the_same_bits_in_any_way(folder, monkeypatch):
    """Chunks, trees, batches, graphs and reused prefixes against one token at a time, in bfloat16."""
    shrink(monkeypatch)
    one = loader._in_order(replace(plainly_loaded(folder, "bfloat16"), kernels=True, fp8_kv=True))
    tokens = [random.Random(1).randrange(300) for _ in range(40)]
    rows = token_by_token(GraphRunner(one, PAGES, PAGE, buckets=()), tokens, 28)
    read_all(Target(one, [tokens], [rows]), graphed(one), 0)


def load(folder, monkeypatch, dtype, **options):
    """Through the whole of load, as on a GPU."""
    monkeypatch.setattr(loader, "check_kv_dtype", lambda *_: None)
    monkeypatch.setattr(loader, "_with_kernels", lambda loaded, say: replace(loaded, kernels=True))
    return plainly_loaded(folder, dtype, kv_dtype="fp8", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_model_is_loaded_and_checked(folder, monkeypatch, dtype):
    """Fused, past the check at load; a number takes a byte, and the log names the loss."""
    said: list[str] = []
    found = load(folder, monkeypatch, dtype, say=said.append)
    assert found.fp8_kv
    assert hasattr(found.model, "stack")
    assert found.kv_bytes_per_token == 2 * 2 * 16
    assert "fp8 kv" in found.arithmetic
    assert any(line.startswith("fp8 keys and values move logits of random tokens by") for line in said)


def test_the_check_at_load_sees_what_is_not_rounded(folder, loaded):
    """A runner that keeps whole numbers computes another model."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.raises(ModelError, match="gives other logits over paged memory"):
        check_paged(replace(loaded, fp8_kv=False), run_plain(network, 512, fp8_kv=True))


def test_a_model_whose_kernels_do_not_run_is_refused(folder, monkeypatch):
    """Plain torch keeps no such keys and values."""

    def misfit(*_, **__):
        raise ModelError("model: other logits")

    monkeypatch.setattr(loader, "check_paged", misfit)
    with pytest.raises(
        ModelError, match=r"^kv_dtype: fp8 takes kernels of GPUs, .* \(model: other logits\); leave"
    ):
        load(folder, monkeypatch, "float32")


def test_pages_move_to_a_replica_of_the_same_kind_alone(loaded):
    """There a text goes on in the same bits; one with whole numbers refuses the layout."""
    first, second = graphed(loaded), graphed(loaded)
    texts = [SequenceKv.open(each.pool, []) for each in (first, second)]
    for each, kv in zip((first, second), texts, strict=True):
        each.forward([Segment(kv, list(range(5, 18)), None, [12])])
        each.commit(kv, range(13), range(5, 18))
    memories = [each.page_memory() for each in (first, second)]
    for theirs, ours in zip(texts[0].pages, texts[1].pages, strict=True):
        content = memories[0].read(theirs, PAGE)
        memories[1].write(ours, bytes(len(content)))
        memories[1].write(ours, content)
    rows = [
        each.forward([Segment(kv, [3], None, [0])]) for each, kv in zip((first, second), texts, strict=True)
    ]
    assert torch.equal(*rows)
    whole = graphed(replace(loaded, fp8_kv=False))
    assert 4 * memories[0].page_bytes == whole.page_memory().page_bytes
    with pytest.raises(InvalidRequest, match=r"layout\.arithmetic"):
        layout_of(whole, whole.page_memory()).check(layout_of(first, memories[0]))
    assert layout_of(first, memories[0]).dtype == "fp8"
