"""Small parts of the benchmarks: deliveries, noised drafts, deliveries of a worker, tokens of a step."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from benchmarks.arms.llama import add, server_command
from benchmarks.arms.worker import engine_of, request_of
from benchmarks.load import noised_copy
from benchmarks.samples import SampledRequest
from benchmarks.step import repeated
from tests.models import build_model


def test_tokens_of_one_pass_are_one_delivery() -> None:
    """Events moments apart are joined at the time of the first."""
    arrivals: list[tuple[float, int]] = []
    for now in (1.0, 1.0001, 1.02):
        add(arrivals, now, 1)
    assert arrivals == [(1.0, 2), (1.02, 1)]


def test_a_server_without_a_draft_is_told_of_none(tmp_path) -> None:
    """Draft flags appear with a draft only; the context is that of all slots."""
    plain = server_command(tmp_path, tmp_path, None, 0, 2, 8, 2048, 1234)
    assert "-md" not in plain
    assert plain[plain.index("-c") + 1] == "16384"
    drafted = server_command(tmp_path, tmp_path, tmp_path / "d", 5, 2, 8, 2048, 1234)
    assert drafted[drafted.index("--spec-draft-n-max") + 1] == "5"


def test_a_worker_says_what_it_runs_on() -> None:
    """The versions of its first line, as text."""
    assert engine_of({"versions": {"vllm": "0.32", "torch": "2.13"}}) == "vllm 0.32, torch 2.13"


def test_a_worker_answer_becomes_a_request() -> None:
    """Lists of JSON become tuples; passes are optional."""
    answer = {"tokens": [1, 2], "arrivals": [[0.1, 1], [0.2, 1]]}
    assert request_of(answer) == SampledRequest((1, 2), ((0.1, 1), (0.2, 1)), 0)


def test_a_step_may_be_longer_than_its_context() -> None:
    """It begins the context's tokens again."""
    assert repeated((7, 8, 9), 5) == [7, 8, 9, 7, 8]


def test_a_noised_draft_is_another_model_of_the_same_shape(tmp_path) -> None:
    """Matrices change by as much as they vary, vectors and the tokenizer do not."""
    source = build_model("llama", tmp_path / "source")
    copy = noised_copy(source, tmp_path / "bad")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, copy))
    for name, weight in before.items():
        change = (after[name].float() - weight.float()).std() / weight.float().std()
        assert torch.equal(weight, after[name]) if weight.ndim < 2 else 0.9 < change < 1.1
    assert (copy / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
