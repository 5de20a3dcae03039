"""A model in several ranks: as threads for what they compute, as processes for how they live."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.config import VerifyConfig
from outrider.engine.loading.check_determinism import check_determinism
from outrider.engine.loading.check_forward import check_paged
from outrider.engine.parallel import shard as shards
from outrider.engine.parallel.mirror import Leading, follow
from outrider.engine.parallel.order import Order
from outrider.engine.runner import ModelRunner
from tests.unit.engine.parallel.threads import SECONDS, Table, ThreadRanks

PAGES, PAGE_SIZE = 64, 4


def settings(folder: Path, ranks: int, **more: Any) -> VerifyConfig:
    """Of a model in so many ranks, in float32 on the CPU."""
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", "tensor_parallel": ranks, **more}
    return VerifyConfig(**{"kv_tokens": PAGES * PAGE_SIZE, **given})


@dataclass
class Threads:
    """Rank 0's runner, and what it has sent."""

    runner: ModelRunner
    ranks: ThreadRanks


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Threads]]:
    """Load a folder in some ranks, the others as threads that follow until the test ends."""
    _one_at_a_time(monkeypatch)
    started: list[tuple[Leading, list[threading.Thread]]] = []

    def load(folder: Path, size: int, **more: Any) -> Threads:
        table, config = Table(size), settings(folder, size, **more)
        shard = _shard(config, 0)
        others = [
            threading.Thread(target=_follow, args=(config, ThreadRanks(table, rank)), daemon=True)
            for rank in range(1, size)
        ]
        for other in others:
            other.start()
        ranks: Any = ThreadRanks(table, 0)
        leading = Leading(ranks)
        loaded, plain = shard.small(ranks)
        check_paged(loaded, plain, prepare=lambda runner: _lead(runner, leading))
        if config.deterministic:
            check_determinism(loaded, lambda runner: _lead(runner, leading))
        leading.end()
        runner = ModelRunner(shard.whole(ranks), PAGES, PAGE_SIZE)
        _lead(runner, leading)
        started.append((leading, others))
        return Threads(runner, ranks)

    yield load
    for leading, others in started:
        leading.end()
        for other in others:
            other.join(SECONDS)
            assert not other.is_alive()


def _follow(config: VerifyConfig, ranks: Any) -> None:
    shard = _shard(config, ranks.rank)
    loaded, _ = shard.small(ranks)
    follow(ModelRunner(loaded, PAGES, PAGE_SIZE), ranks)
    follow(ModelRunner(shard.whole(ranks), PAGES, PAGE_SIZE), ranks)


def _shard(config: VerifyConfig, rank: int) -> shards.Shard:
    return shards.Shard(Order(config=config, rank=rank, meeting="", seconds=SECONDS), lambda _: None)


def _lead(runner: ModelRunner, leading: Any) -> None:
    runner.mirror = leading


def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers builds models with settings of the whole process."""
    lock = threading.RLock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with lock:
                return function(*arguments)

        return call

    for name in ("network_of", "small_config", "random_network", "skeleton_of", "read_config"):
        monkeypatch.setattr(shards, name, locked(getattr(shards, name)))
