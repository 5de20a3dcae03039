"""With `deterministic` a token's bits are the same however it is computed, or the model does not load."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import check_determinism
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests.models import build_model

VOCABULARY = 300
LENGTH = 150
"""Longer than a block of keys."""
TEXTS = 2
QUICK = ("llama", "mistral", "gpt2", "gpt_neox")
"""Plain attention, with a window, and other layers than Llama's."""
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("phi3", "qwen2", "qwen3", "olmo2", "phi", "starcoder2")
]
OTHERS = ("deepseek_v3", "gemma2", "gpt_oss")
"""Modules of its own, capped scores, and experts."""
needs_kernels = pytest.mark.skipif(
    vector_backend(torch.bfloat16) is None,
    reason="the kernels need AVX2 or AVX-512 BF16 and the package numba",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model, some texts, and what it computes for them token by token."""

    loaded: LoadedModel
    texts: list[list[int]]
    alone: list[torch.Tensor]
    """[LENGTH, V] logits of each text."""


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


def token_by_token(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    """[T, V] logits."""
    kv = SequenceKv.open(runner.pool, text, reuse=False)
    rows = []
    for token in text:
        rows.append(runner.forward([Segment(kv, [token], None, [0])]))
        runner.commit(kv, [0], [token])
    kv.release()
    return torch.cat(rows)


class Reader:
    """Reads one text in random pieces: chunks, or trees that hold its next tokens among others."""

    def __init__(self, runner: ModelRunner, text: list[int], alone: torch.Tensor, rng: random.Random) -> None:
        self.runner, self.text, self.alone, self.rng = runner, text, alone, rng
        self.kv = SequenceKv.open(runner.pool, text)
        self.path: list[int] = []
        """Offsets of the text's own tokens in the piece."""

    @property
    def done(self) -> bool:
        """The whole text is committed."""
        return self.kv.length == len(self.text)

    def piece(self) -> Segment:
        """The next tokens, perhaps with others."""
        size = self.rng.choice([1, 1, 2, 3, 5, 9, 20, 90])
        tokens = self.text[self.kv.length :][:size]
        if size > 9 or self.rng.random() < 0.4:
            self.path = list(range(len(tokens)))
            return Segment(self.kv, tokens, None, self.path)
        nodes: list[int] = []
        parents: list[int] = []
        self.path = []
        for token in tokens:
            for _ in range(self.rng.randrange(3)):
                nodes.append(self.rng.randrange(VOCABULARY))
                parents.append(self.rng.randrange(-1, len(nodes) - 1))
            nodes.append(token)
            parents.append(self.path[-1] if self.path else -1)
            self.path.append(len(nodes) - 1)
        return Segment(self.kv, nodes, parents, self.path)

    def check_and_commit(self, logits: torch.Tensor) -> None:
        """Compare the rows [path, V] bit for bit, keep some of the path, throw the rest away."""
        start = self.kv.length
        assert torch.equal(logits, self.alone[start : start + len(self.path)]), f"from token {start} on"
        keep = self.path[: self.rng.randint(1, len(self.path))]
        self.runner.commit(self.kv, keep, self.text[start : start + len(keep)])


def read_all(target: Target, page_size: int, seed: int) -> None:
    """All texts in random pieces side by side; the second finds the beginning of the first in the cache."""
    rng = random.Random(seed)
    runner = ModelRunner(target.loaded, 4 * LENGTH // page_size * TEXTS, page_size)
    readers: list[Reader] = []
    waiting = list(zip(target.texts, target.alone, strict=True))
    while waiting or any(not reader.done for reader in readers):
        if waiting and (not readers or rng.random() < 0.2):
            readers.append(Reader(runner, *waiting.pop(0), rng))
        running = [reader for reader in readers if not reader.done and rng.random() < 0.8]
        pieces = [reader.piece() for reader in running]
        logits = runner.forward(pieces) if pieces else torch.empty(0)
        parts = torch.split(logits, [len(piece.wanted) for piece in pieces]) if pieces else ()
        for reader, part in zip(running, parts, strict=True):
            reader.check_and_commit(part)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", [*QUICK, *SLOW])
def test_any_way_of_computing_gives_the_same_bits(
    target_of: Callable[[str, str], Target], architecture: str, dtype: str
) -> None:
    """Chunks, trees, batches, page sizes and reused prefixes against one token at a time."""
    target = target_of(architecture, dtype)
    for seed, page_size in ((0, 4), (1, 16), (2, 7)):
        read_all(target, page_size, seed)


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
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "gemma2": "the activation of Gemma2ForCausalLM",
        "gpt_oss": "the experts of GptOssForCausalLM",
    }
    assert f"deterministic: {parts[architecture]} is computed" in refusal(folder_of(architecture))


@needs_kernels
def test_a_bound_on_the_scores_is_refused(tmp_path: Path) -> None:
    """The attention kernel does not know it."""
    folder = build_model("gemma2", tmp_path, hidden_activation="silu")
    assert "deterministic: the attention of Gemma2ForCausalLM is computed" in refusal(folder)


def test_another_activation_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Torch computes GELU, and rounds by where a row stands in the batch."""
    folder = shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert "LlamaForCausalLM is computed" in refusal(folder)


def test_another_device_is_refused(folder_of: Callable[[str], Path]) -> None:
    """Other kernels run there."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1)
    with pytest.raises(ModelError, match="deterministic: a model on cuda:0 is computed by the library"):
        check_determinism.check_determinism(replace(loaded, device=torch.device("cuda:0")))


@needs_kernels
def test_with_them_threads_and_helpers_change_no_bit(
    target_of: Callable[[str, str], Target], folder_of: Callable[[str], Path]
) -> None:
    """The worker pool cuts the work between sums, never within one."""
    target, folder = target_of("llama", "float32"), str(folder_of("llama"))
    core = min(os.sched_getaffinity(0))
    shared = load_model(
        folder, dtype="float32", device="cpu", threads=2, deterministic=True, helper_cores=[core]
    )
    torch.set_num_threads(1)
    read_all(replace(target, loaded=shared), 4, 0)


def test_without_it_bits_differ(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above finds the library's attention out."""
    monkeypatch.setattr("outrider.engine.runner.attends", lambda *shape: False)
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1, fused=False)
    with pytest.raises(AssertionError, match="from token"):
        read_all(random_text(loaded), 4, 0)


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
