"""Recurrent layers of models; `test_runner.py` compares all of them with the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.engine.kv.kept_states import size_of
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.recurrent.layers import MAX_BYTES, recurrent_layers
from outrider.engine.recurrent.probing import StatefulModule, recurrent_modules
from outrider.engine.runner import ModelRunner, Segment
from tests.models import ARCHITECTURES, RECURRENT, build_model
from tests.unit.engine.conftest import Pair
from tests.unit.engine.kernel_marks import needs_kernels

_BY_KERNELS = [
    *("qwen3_5", "qwen3_next", "olmo_hybrid"),
    *("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"),
]
AT_ONCE = [
    *("lfm2", "lfm2_moe", "lfm3"),
    *(pytest.param(name, marks=needs_kernels) for name in _BY_KERNELS),
]
"""Those whose candidates need no levels."""
PAGE, PROMPT = 4, list(range(2, 43))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma4"])
def test_models_with_attention_alone_have_none(pair_of: Callable[..., Pair], architecture: str) -> None:
    """Convolutions or caches alone make no recurrent layer."""
    assert architecture in ARCHITECTURES
    assert recurrent_layers(pair_of(architecture).plain) is None


@pytest.mark.parametrize("architecture", RECURRENT)
def test_states_are_read_by_several_tokens_at_once(pair_of: Callable[..., Pair], architecture: str) -> None:
    """But in Jamba and Zamba, whose modules start anew: their tokens go one by one."""
    plain = pair_of(architecture).plain
    cache = DynamicCache(config=plain.config)
    found = {
        StatefulModule(module, cache, plain.config.hidden_size).reads_all_of_a_state()
        for module in recurrent_modules(plain)
    }
    assert found == {architecture not in ("jamba", "zamba")}


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_sequence_may_begin_with_one_token(pair_of: Callable[..., Pair], architecture: str) -> None:
    """Though other layers still hold the states of their last call."""
    pair, rows = pair_of(architecture), []
    runner = ModelRunner(pair.loaded, 64, PAGE)
    kv = SequenceKv.open(runner.pool, [])
    for token in PROMPT[:3]:
        rows.append(runner.forward([Segment(kv, [token], None, [0])]))
        runner.commit(kv, [0], [token])
    torch.testing.assert_close(torch.cat(rows), pair.expected(PROMPT[:3]), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "kimi_linear", "bamba"])
def test_projections_run_once_for_all_tokens(pair_of: Callable[..., Pair], architecture: str) -> None:
    """A tree of three levels calls each of them once a step."""
    loaded = pair_of(architecture).loaded
    runner = ModelRunner(loaded, 64, PAGE)
    modules = recurrent_modules(loaded.model)
    calls: list[torch.nn.Module] = []
    kinds = {
        type(child) for module in modules for child in module.modules() if hasattr(child, "out_features")
    }
    kv = SequenceKv.open(runner.pool, [])
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            original = kind.forward

            def noted(self: torch.nn.Module, x: torch.Tensor, original: Callable = original) -> torch.Tensor:
                calls.append(self)
                return original(self, x)

            patch.setattr(kind, "forward", noted)
        runner.forward([Segment(kv, [3, 4, 5, 6], [-1, 0, 1, 1], [3])])
    for module in modules:
        ends = [child for name, child in module.named_modules() if name in ("in_proj", "out_proj", "q_proj")]
        assert ends
        assert [calls.count(end) for end in ends] == [1] * len(ends)


def test_a_state_takes_the_bytes_that_it_says(pair_of: Callable[..., Pair]) -> None:
    """And bounds how many candidates a sequence has."""
    loaded = pair_of("qwen3_5").loaded
    runner = ModelRunner(loaded, 64, PAGE)
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, PROMPT, None, [], certain=len(PROMPT))])
    runner.commit(kv, range(len(PROMPT)), PROMPT)
    layers = runner._recurrent
    assert layers is not None
    assert layers.state_bytes == size_of(kv.end_states)
    layers.state_bytes = MAX_BYTES // 10
    assert (runner.candidates(4), runner.candidates(64)) == (4, 10)
    layers.state_bytes = 2 * MAX_BYTES
    assert runner.candidates(64) == 1


def test_a_model_that_computes_prompts_otherwise_runs_as_it_generates(tmp_path: Path) -> None:
    """Nemotron H bounds its time steps in prompts alone; the check at load knows what is one."""
    folder = build_model("nemotron_h", tmp_path, time_step_min=0.5)
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        prompt = plain(torch.tensor([PROMPT]), use_cache=True)
        step = plain(torch.tensor([[7]]), past_key_values=prompt.past_key_values).logits[0]
        otherwise = plain(torch.tensor([[*PROMPT, 7]])).logits[0, -1:]
    runner = ModelRunner(loaded, 64, PAGE)
    kv = SequenceKv.open(runner.pool, [])
    segment = Segment(kv, [*PROMPT, 7], None, [len(PROMPT)], certain=len(PROMPT))
    torch.testing.assert_close(runner.forward([segment]), step, rtol=1e-4, atol=5e-4)
    assert not torch.allclose(otherwise, step, rtol=1e-4, atol=5e-4)


def test_pages_alone_do_not_move(pair_of: Callable[..., Pair]) -> None:
    """Another replica would lack the states."""
    assert ModelRunner(pair_of("qwen3_5").loaded, 8, PAGE).page_memory() is None


@pytest.mark.parametrize("architecture", AT_ONCE)
def test_known_layers_compute_a_tree_at_once(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """No module of transformers convolves; the logits, also behind a commit, are the plain model's."""
    pair = pair_of(architecture)
    runner, text = ModelRunner(pair.loaded, 64, PAGE), [5, 9, 6, 7, 8, 30, 31]
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, text[:3], None, [], certain=3)])
    runner.commit(kv, range(3), text[:3])
    with monkeypatch.context() as patch:
        patch.delattr(torch.nn.functional, "conv1d")
        logits = runner.forward([Segment(kv, [40, *text[3:6], 41], [-1, -1, 1, 2, 2], [1, 2, 3])])
    torch.testing.assert_close(logits, pair.expected(text)[3:6], rtol=1e-4, atol=5e-4)
    runner.commit(kv, [1, 2], text[3:5])
    logits = runner.forward([Segment(kv, text[5:], None, range(2), certain=2)])
    torch.testing.assert_close(logits, pair.expected(text)[5:], rtol=1e-4, atol=5e-4)
