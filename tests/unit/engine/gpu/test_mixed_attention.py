"""Layers whose heads differ, or that see keys and values of another layer, on the kernels, through Triton's
interpreter.

`test_runner` compares the logits of such models with those of the plain runner.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.gpu import runner as runners
from outrider.engine.gpu.layout import BufferLayout
from outrider.engine.gpu.plan import graph_capacity
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import loader
from outrider.engine.loading.check_determinism import library_part
from outrider.engine.loading.check_forward import check_paged, run_plain
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.gpu.test_deterministic import GPU, in_order, plainly_loaded

PAGES, PAGE = 16, 4
PROMPT = [5, 9, 2, 7, 30, 31, 32, 33, 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model of four layers, the last two of which see keys and values of the first two."""
    return build_model("gemma4", tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedModel:
    """The same as a GPU has it."""
    return replace(plainly_loaded(folder), kernels=True)


def prompted(loaded: LoadedModel) -> tuple[GraphRunner, SequenceKv]:
    """A runner, and a sequence with a committed prompt in its first pages."""
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=())
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, PROMPT, None, [])])
    runner.commit(kv, range(len(PROMPT)), PROMPT)
    return runner, kv


@pytest.mark.parametrize("fp8", [False, True])
def test_shared_keys_and_values_are_kept_once(loaded, fp8):
    """One layer of two kv heads of 16 columns, one of a single wider one."""
    loaded = replace(loaded, fp8_kv=fp8)
    memory = GraphRunner(loaded, PAGES, PAGE, buckets=()).page_memory()
    assert memory.page_bytes == PAGE * loaded.kv_bytes_per_token
    assert memory.page_bytes == PAGE * (1 if fp8 else 4) * (2 * 2 * 16 + 2 * 1 * 32)


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pages_mean_the_same_at_another_replica(loaded, fp8):
    """A runner that has only the bytes of the pages goes on as the one that computed them."""
    runner, kv = prompted(replace(loaded, fp8_kv=fp8))
    memory, branches = runner.page_memory(), Segment(kv, [3, 4, 8], [-1, 0, 0], range(3))
    pages = [memory.read(page, PAGE) for page in range(PAGES)]
    expected = runner.forward([branches])
    kv.rollback()
    for page in range(PAGES):
        memory.write(page, bytes(len(pages[page])))
    for page, content in enumerate(pages):
        memory.write(page, content)
    assert torch.equal(runner.forward([branches]), expected)


def test_entries_move_in_all_parts(loaded):
    """In the step after the commit that moves them, by the graph's own launches."""
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=(4,), graphs=FakeGraphs())
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, PROMPT, None, [])])
    runner.commit(kv, range(len(PROMPT)), PROMPT)
    runner.forward([Segment(kv, [3, 4, 8], [-1, -1, 1], [])])
    slots = kv.slots[kv.length : kv.length + 3].tolist()
    before = [entries[:, slots].clone() for entries in runner.attention.stores()]
    assert len(before) == 4
    runner.commit(kv, [1, 2], [4, 8])
    runner.forward([Segment(kv, [6], None, [0])])
    for entries, old in zip(runner.attention.stores(), before, strict=True):
        assert torch.equal(entries[:, slots[:2]], old[:, 1:])


def test_its_own_modules_run_on_the_kernels_too(folder, loaded, monkeypatch):
    """As models do that cannot be fused: a layer stores what it sees of another one again."""
    monkeypatch.setattr(loader, "_made_fused", lambda loaded, *_: loaded)
    own = replace(plainly_loaded(folder), kernels=True)
    found = [GraphRunner(own, PAGES, PAGE, buckets=()), ModelRunner(loaded, PAGES, PAGE)]
    rows = [
        each.forward([Segment(SequenceKv.open(each.pool, []), PROMPT, None, range(len(PROMPT)))])
        for each in found
    ]
    torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_keys_and_values_of_8_bits_pass_the_check_at_load(folder, loaded):
    """Against transformers with a cache that rounds."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_paged(replace(loaded, fp8_kv=True), run_plain(network, 512, fp8_kv=True))


def test_every_part_can_be_put_in_order(folder):
    """For `deterministic`: the products of the layers' own inputs too."""
    assert library_part(replace(in_order(folder), device=GPU)) is None


def test_a_step_has_room_for_the_part_that_needs_most(loaded, monkeypatch):
    """Parts take turns in it; items keep the device busy in the part with the fewest kv heads."""
    monkeypatch.setattr(runners, "multiprocessors", lambda device: 8)
    runner = GraphRunner(loaded, PAGES, PAGE, buckets=())
    assert runner.settings.items == 16
    layout = BufferLayout(graph_capacity(8, runner.settings))
    step = runner.attention.open_step(torch.empty(0), layout, 1)
    assert len(step.partial) == (8 + 16) * 32 * 32, "eight tokens with four query heads of the wide kv head"
    assert len(step.statistics) == 2 * (8 + 16) * 32
