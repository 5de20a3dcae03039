"""Ranks that hold different models find out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.loading.model_config import read_config
from outrider.engine.loading.open_weights import InMemory, OpenWeights
from outrider.engine.parallel.sameness import check_same, digest_of
from outrider.protocol.errors import ModelError
from tests.models import build_model
from tests.unit.engine.parallel.conftest import settings
from tests.unit.engine.parallel.threads import Table, ThreadRanks


def digest(folder: Path, **more: Any) -> str:
    """Of a model in two ranks."""
    with OpenWeights(str(folder)) as checkpoint:
        return digest_of(settings(folder, 2, **more), read_config(str(folder), False), checkpoint.weights)


def test_a_digest_tells_models_and_settings_apart(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The same files elsewhere are the same; what differs between machines does not count."""
    folder = folder_of("llama")
    (tmp_path / "copy").symlink_to(folder)
    others = [
        digest(build_model("llama", tmp_path / "trained", seed=9)),
        digest(folder_of("qwen2")),
        digest(folder, kv_tokens=512),
        digest(folder, dtype="bfloat16"),
        digest(folder, max_step_tokens=256),
    ]
    assert len({digest(folder), *others}) == 6
    assert digest(tmp_path / "copy") == digest(folder)
    assert digest(folder, tensor_parallel_rank=1, host="other", threads=2, cpus="0") == digest(folder)


def test_weights_of_every_shape_and_dtype_count(folder_of: Callable[[str], Path]) -> None:
    """Numbers, rows and tables, in 16 bits too."""
    folder = folder_of("llama")
    config = read_config(str(folder), False)
    tensors = [torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.ones(2, 3, dtype=torch.bfloat16)]
    found = set()
    for tensor in [*tensors, *(tensor + 1 for tensor in tensors)]:
        found.add(digest_of(settings(folder, 2), config, {"w": InMemory(tensor)}))
    assert len(found) == 6


def test_all_ranks_must_say_the_same() -> None:
    """A rank learns that another has a different model, and the sentence says which one."""
    ranks: list[Any] = [ThreadRanks(Table(1), 0)]
    check_same(ranks[0], "a")
    table = Table(3)
    ranks = [ThreadRanks(table, rank) for rank in range(3)]
    for rank in (0, 1, 2):
        ranks[rank].report("digest", "a" if rank < 2 else "b")
    with pytest.raises(
        ModelError, match=r"rank 2 has another model, .*kv_tokens.* start all ranks with the same"
    ):
        check_same(ranks[1], "a")
