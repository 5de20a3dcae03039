"""Forwards that are repeated without the interpreter say what computed ones say, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import runner as runners
from outrider.engine.cpu import recording
from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.recording import Recording, Scratch
from outrider.engine.fused_decoder.recorded_forward import MAX_SHORT, RecordedForward, _Recorded
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model
from tests.unit.engine.kernel_marks import dtypes, needs_kernels

Folders = Callable[[str], Path]
REPEATED = (
    *("llama", "qwen3", "mistral", "olmo", "smollm3"),
    *("gemma", "gemma3", "gpt2", "gpt_neox", "phi", "olmo2", "exaone4", "granite", "cohere2"),
    *("opt", "nemotron", "gemma2"),
    "qwen3_moe",
)
"""The first: nothing but kernels; norms of heads, windows, layer norms, layers without a turn. The second:
factors, sums and gates too. The last: experts, which torch chooses."""
TURNS = 5


def runner_of(folder: Path, dtype: torch.dtype, **options: Any) -> ModelRunner:
    """A runner on the kernels of the project."""
    backend = vector_backend(dtype)
    assert backend is not None
    name = str(dtype).removeprefix("torch.")
    loaded = load_model(str(folder), dtype=name, device="cpu", threads=1, cpu_backend=backend, **options)
    return ModelRunner(loaded, 128, 4)


def texts(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of steps of equal sizes: two texts that grow, in one group or in two, and a tree. Then of long
    steps, which are recorded at once."""
    one, two = (SequenceKv.open(runner.pool, []) for _ in range(2))
    logits = [runner.forward([Segment(one, range(5, 25), None, [19]), Segment(two, range(7), None, [])])]
    runner.commit(one, range(20), range(5, 25))
    runner.commit(two, range(7), range(7))
    for turn in range(TURNS):
        token = 30 + turn
        logits.append(runner.forward([Segment(one, [token], None, [0]), Segment(two, [token], None, [0])]))
        runner.commit(one, [0], [token])
        runner.commit(two, [0], [token])
        logits.append(runner.forward([Segment(two, [token, 8, 9, 10], [-1, -1, 0, 2], [0, 3])]))
        runner.commit(two, [0, 2], [token, 9])
    for size in (MAX_SHORT + 1, MAX_SHORT + 9, MAX_SHORT + 9, MAX_SHORT + 1):
        prompt = Segment(one, range(size), None, [0, size - 1])
        logits.append(runner.forward([prompt, Segment(two, [size, 8, 9], [-1, 0, 0], [1, 2])]))
        runner.commit(one, range(size), range(size))
        runner.commit(two, [0, 2], [size, 9])
    return logits


def repeats(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the steps that the runner repeats from now on."""
    repeat, found = _Recorded.repeat, list[int]()

    def count(self: _Recorded, step: Any) -> torch.Tensor:
        found.append(len(step.slots))
        return repeat(self, step)

    monkeypatch.setattr(_Recorded, "repeat", count)
    assert isinstance(runner._logits, RecordedForward)
    return found


def same(recorded: list[torch.Tensor], computed: list[torch.Tensor]) -> bool:
    """True for equal bits."""
    return all(torch.equal(*pair) for pair in zip(recorded, computed, strict=True))


@needs_kernels
@dtypes
@pytest.mark.parametrize("architecture", REPEATED)
def test_repeated_forwards_equal_computed_ones(
    folder_of: Folders, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step of a size that came twice before, or once if it is long, over texts and trees that
    differ."""
    runner = runner_of(folder_of(architecture), dtype)
    found = repeats(runner, monkeypatch)
    recorded = texts(runner)
    assert sorted(found) == [2] * (TURNS - 2) + [4] * (TURNS - 2) + [MAX_SHORT + 4, MAX_SHORT + 12]
    monkeypatch.setattr(runners, "can_be_recorded", lambda attention: False)
    assert same(recorded, texts(runner_of(folder_of(architecture), dtype)))


@needs_kernels
def test_forwards_are_repeated_until_queries_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ministral 3 scales queries from a position on; the longer text reaches it in its last turn."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 20 + TURNS - 1
    folder = build_model("ministral3", tmp_path, rope_parameters=rope)
    runner = runner_of(folder, torch.float32)
    found = repeats(runner, monkeypatch)
    recorded = texts(runner)
    assert sorted(found) == [2] * (TURNS - 3) + [4] * (TURNS - 2)
    monkeypatch.setattr(runners, "can_be_recorded", lambda attention: False)
    assert same(recorded, texts(runner_of(folder, torch.float32)))


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_are_repeated_too(
    folder_of: Folders, architecture: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are prepared by a kernel of their own."""
    runner = runner_of(folder_of(architecture), torch.bfloat16, weights=weights)
    found = repeats(runner, monkeypatch)
    recorded = texts(runner)
    assert found
    monkeypatch.setattr(runners, "can_be_recorded", lambda attention: False)
    assert same(recorded, texts(runner_of(folder_of(architecture), torch.bfloat16, weights=weights)))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_of_experts_may_be_torchs(
    folder_of: Folders, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of gpt-oss: Python is called between the kernels in each repetition."""
    runner = runner_of(folder_of("gpt_oss"), dtype)
    found = repeats(runner, monkeypatch)
    recorded = texts(runner)
    assert found
    monkeypatch.setattr(runners, "can_be_recorded", lambda attention: False)
    assert same(recorded, texts(runner_of(folder_of("gpt_oss"), dtype)))


@needs_kernels
@pytest.mark.parametrize("architecture", ["apertus"])
def test_models_that_torch_computes_in_part_are_not_repeated(
    folder_of: Folders, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare activations are torch's: each step is computed."""
    runner = runner_of(folder_of(architecture), torch.float32)
    found = repeats(runner, monkeypatch)
    recorded = texts(runner)
    assert not found
    monkeypatch.setattr(runners, "can_be_recorded", lambda attention: False)
    assert same(recorded, texts(runner_of(folder_of(architecture), torch.float32)))


@needs_kernels
def test_long_forwards_share_the_memory_of_recordings(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory would have to be cleared by the system, for each layer of each step."""
    runner, made, allocate = runner_of(folder_of("llama"), torch.float32), list[int](), recording._aligned
    monkeypatch.setattr(recording, "_aligned", lambda size: made.append(size) or allocate(size))
    for size in (2, 2, 4 * MAX_SHORT):
        warms_up(runner, size)
    assert made
    made.clear()
    for size in (4 * MAX_SHORT, MAX_SHORT + 1):
        warms_up(runner, size)
    assert not made


@needs_kernels
def test_the_first_two_forwards_of_a_size_warm_up(folder_of: Folders) -> None:
    """One is computed, one recorded. Long ones, and those of models that torch computes in part, do not."""
    runner = runner_of(folder_of("llama"), torch.float32)
    for size, expected in ((2, [True, True, False, False]), (MAX_SHORT + 1, [False, False])):
        assert [warms_up(runner, size) for _ in expected] == expected
    computed = runner_of(folder_of("apertus"), torch.float32)
    assert [warms_up(computed, size) for size in (2, 2, 2, 3)] == [True, True, False, False]


def warms_up(runner: ModelRunner, size: int) -> bool:
    """What the runner says behind a forward of so many tokens."""
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, range(size), None, [0])])
    kv.release()
    return runner.warming_up


@needs_kernels
def test_features_are_taken_from_computed_forwards(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a repeated one enters the interpreter, and other steps are repeated all the same."""
    runner = runner_of(folder_of("llama"), torch.float32)
    found = repeats(runner, monkeypatch)
    for _ in range(4):
        kv = SequenceKv.open(runner.pool, [])
        _, taken = runner.forward_with_features([Segment(kv, [5, 6], None, [0, 1], featured=[0, 1])], [0, 1])
        assert all(rows.shape[0] == 2 for rows in taken.values())
        kv.rollback()
        runner.forward([Segment(kv, range(MAX_SHORT + 1), None, [0])])
        kv.rollback()
    assert found == [MAX_SHORT + 1] * 3


def test_what_torch_computes_is_noticed() -> None:
    """Views and copies of rows compute nothing."""
    x, y, which = torch.randn(4, 8), torch.randn(4, 8), torch.tensor([2, 0])
    for allowed in (lambda: x.view(8, 4).flatten(), lambda: x[1:3].t(), lambda: x.index_select(0, which)):
        recording = Recording(Scratch())
        recording.record(allowed)
        assert not recording.refused
    for computed in (
        *(lambda: x + 1, lambda: x.clone().relu_(), lambda: x.t().reshape(4, 8), lambda: x.sum()),
        *(lambda: x.add_(x, alpha=2), lambda: x.add_(y[0]), lambda: x.mul_(x), lambda: x.t().mul_(2)),
    ):
        recording = Recording(Scratch())
        recording.record(computed)
        assert recording.refused


def test_memory_between_kernels_is_used_again_two_stretches_later() -> None:
    """What was made before the first attention stays, and all recordings share the memory."""
    scratch, addresses = Scratch(), []
    for _ in range(2):
        scratch.begin()
        for _ in range(5):
            addresses.append(scratch.empty((3, 5), torch.bfloat16).data_ptr())
            scratch.next_stretch()
    first, one, two = addresses[:3]
    assert addresses == 2 * [first, one, two, one, two]
    assert len({first, one, two}) == 3
    assert not any(address % 64 for address in addresses)


@needs_kernels
@dtypes
@pytest.mark.parametrize("count", [1, 33, 1000])
def test_recorded_sums_and_multiples_have_the_bits_of_torch(dtype: torch.dtype, count: int) -> None:
    """In place and in new memory; also for float16 that is too large or too small."""
    generator = torch.Generator().manual_seed(count)
    x, y = (
        (torch.randn(count, generator=generator) * 10.0 ** torch.randint(-15, 15, (count,))).to(dtype)
        for _ in range(2)
    )
    factor = torch.tensor(45.25, dtype=dtype)
    for compute in (
        lambda a: a.add_(y),
        lambda a: a * 0.22,
        lambda a: a.mul_(3),
        lambda a: a * factor,
    ):
        recording = Recording(Scratch())
        made = recording.record(lambda compute=compute: compute(x.clone()))
        assert recording.refused == "aten.clone.default"
        torch.testing.assert_close(made, compute(x.clone()), rtol=0.0, atol=0.0, equal_nan=True)
