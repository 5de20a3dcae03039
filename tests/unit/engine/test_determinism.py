"""With `deterministic` a token's bits are the same however it is computed, or the model does not load."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.engine.cpu import layer, matmul
from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import check_determinism
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner
from outrider.protocol.errors import ModelError
from tests.unit.engine.reading import VOCABULARY, Target, read_all, token_by_token

LENGTH = 150
"""Longer than a block of keys."""
TEXTS = 2
QUICK = ("llama", "mistral", "gemma3", "gpt2", "gpt_neox", "nemotron", "mixtral", "gemma2")
"""Plain attention, with a window, another gate, other layers than Llama's, experts, and capped scores."""
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *("phi3", "gemma", "qwen2", "qwen3", "olmo2"),
        *("phi", "starcoder2", "granite", "glm4", "ministral3"),
    )
]
OTHERS = ("deepseek_v3", "gpt_oss")
"""Modules of its own, and experts with a gate of their own."""
needs_kernels = pytest.mark.skipif(
    vector_backend(torch.bfloat16) is None,
    reason="the kernels need AVX2 or AVX-512 and the package numba",
)


@pytest.fixture(scope="module")
def target_of(folder_of: Callable[[str], Path]) -> Callable[[str, str], Target]:
    """A deterministic model by architecture and dtype."""

    @cache
    def load(architecture: str, dtype: str) -> Target:
        folder = str(folder_of(architecture))
        loaded = load_model(folder, dtype=dtype, device="cpu", threads=1, deterministic=True)
        generator = random.Random(1)
        texts = [[generator.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(TEXTS)]
        texts[1][:40] = texts[0][:40]
        runner = ModelRunner(loaded, 2 * LENGTH, 4)
        return Target(loaded, texts, [token_by_token(runner, text) for text in texts])

    return load


def runner_of(loaded: LoadedModel, page_size: int) -> ModelRunner:
    """With memory for all texts and their trees."""
    return ModelRunner(loaded, 4 * LENGTH // page_size * TEXTS, page_size)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", [*QUICK, *SLOW])
def test_any_way_of_computing_gives_the_same_bits(
    target_of: Callable[[str, str], Target], architecture: str, dtype: str
) -> None:
    """Chunks, trees, batches, page sizes and reused prefixes against one token at a time."""
    target = target_of(architecture, dtype)
    for seed, page_size in ((0, 4), (1, 16), (2, 7)):
        read_all(target, runner_of(target.loaded, page_size), seed)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the compiler."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        yield


def refusal(folder: Path, dtype: str = "float32") -> str:
    """The sentence that a model is refused with."""
    with pytest.raises(ModelError, match=r"^deterministic: .* set deterministic off$") as refused:
        load_model(str(folder), dtype=dtype, device="cpu", threads=1, deterministic=True)
    return str(refused.value)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_processor_without_kernels_is_refused(folder_of: Callable[[str], Path], dtype: str) -> None:
    """The sentence says that the library computes the model there."""
    assert "of LlamaForCausalLM is computed by the library's kernels" in refusal(folder_of("llama"), dtype)


@needs_kernels
@pytest.mark.parametrize("architecture", OTHERS)
def test_another_architecture_is_refused(folder_of: Callable[[str], Path], architecture: str) -> None:
    """The sentence names the part of the model, or all of it."""
    parts = {
        "deepseek_v3": "the experts of DeepseekV3ForCausalLM",
        "gpt_oss": "the experts of GptOssForCausalLM",
    }
    assert f"deterministic: {parts[architecture]} is computed" in refusal(folder_of(architecture))


def test_another_activation_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Torch computes it, and may round by where a row stands in the batch."""
    folder = shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "quick_gelu"}))
    assert "LlamaForCausalLM is computed" in refusal(folder)


def test_another_device_is_refused(folder_of: Callable[[str], Path]) -> None:
    """Other kernels run there."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1)
    with pytest.raises(ModelError, match="deterministic: a float32 model on cuda:0 is computed"):
        check_determinism.check_determinism(replace(loaded, device=torch.device("cuda:0")))


@needs_kernels
@pytest.mark.parametrize("threads", [2, 16])
def test_with_them_threads_and_helpers_change_no_bit(
    target_of: Callable[[str, str], Target],
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    """The worker pool cuts the work between sums, never within one; here also work too small to gain."""
    target, folder = target_of("llama", "float32"), str(folder_of("llama"))
    for module in (layer, matmul):
        monkeypatch.setattr(module, "MIN_SHARE", 1)
    core = min(os.sched_getaffinity(0))
    shared = load_model(
        folder, dtype="float32", device="cpu", threads=threads, deterministic=True, helper_cores=[core]
    )
    torch.set_num_threads(1)
    read_all(target, runner_of(shared, 4), 0)


def test_without_it_bits_differ(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above finds the library's attention out."""
    monkeypatch.setattr("outrider.engine.attention.attends", lambda *shape: False)
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1, fused=False)
    with pytest.raises(AssertionError, match="from token"):
        read_all(random_text(loaded), runner_of(loaded, 4), 0)


def random_text(loaded: LoadedModel) -> Target:
    """One text, token by token."""
    generator = random.Random(1)
    text = [generator.randrange(VOCABULARY) for _ in range(LENGTH)]
    return Target(loaded, [text], [token_by_token(ModelRunner(loaded, 2 * LENGTH, 4), text)])


@needs_kernels
def test_the_check_at_load_refuses_other_bits(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose results depend on how many rows there are is found out."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1)
    check_determinism.check_determinism(loaded)
    product = Matmul.__call__

    def wrong(self: Matmul, x: torch.Tensor) -> torch.Tensor:
        return product(self, x) * (1.0 + 1e-5 * len(x))

    monkeypatch.setattr(Matmul, "__call__", wrong)
    with pytest.raises(
        ModelError, match="LlamaForCausalLM in float32 computes other bits for a token in a tree"
    ):
        check_determinism.check_determinism(loaded)
