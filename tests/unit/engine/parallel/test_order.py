"""Settings of several ranks: what goes together, and which cores each gets."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import VerifyConfig
from outrider.engine.parallel import order
from outrider.engine.parallel.order import (
    Order,
    check_settings,
    cpu_share,
    missing_cores,
    split_address,
    threads_of,
)
from outrider.protocol.errors import ConfigError


def config(**settings: Any) -> VerifyConfig:
    """Of a target in two ranks."""
    return VerifyConfig(**{"model": "m", "tensor_parallel": 2, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"helper_cpus": "1"}, "helper_cpus: .*leave it empty"),
        ({"device": "cuda:1"}, "device: .*say cuda or cpu"),
        ({"tensor_parallel_rank": 2, "tensor_parallel_address": "a:1"}, "the ranks 0 to 1"),
        ({"tensor_parallel_rank": 1}, "need tensor_parallel_address"),
        ({"tensor_parallel_address": "nowhere"}, "'nowhere' is not host:port"),
        ({"tensor_parallel_address": ":7"}, "':7' is not host:port"),
        ({"tensor_parallel_address": "host:0"}, "ports are 1 to 65535"),
        ({"tensor_parallel_address": "host:65536"}, "ports are 1 to 65535"),
    ],
)
def test_settings_that_do_not_go_with_ranks(settings: dict[str, Any], said: str) -> None:
    """The sentence names the setting and what to do."""
    with pytest.raises(ConfigError, match=said):
        check_settings(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weights": "int8"},
        {"device": "cuda"},
        {"tensor_parallel_rank": 1, "tensor_parallel_address": "host:29500"},
    ],
)
def test_settings_that_do(settings: dict[str, Any]) -> None:
    """On one machine, on GPUs, and on several machines."""
    check_settings(config(**settings))


def test_an_address_is_split() -> None:
    """At the last colon."""
    assert split_address("verify-0.verify:29500") == ("verify-0.verify", 29500)


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [
        ("", 2, ["", ""]),
        ("0", 2, ["0", "0"]),
    ],
)
def test_too_few_cores_are_everybody_s(cpus: str, ranks: int, expected: list[str]) -> None:
    """Ranks then share what there is."""
    assert [cpu_share(config(cpus=cpus), rank) for rank in range(ranks)] == expected


def test_each_rank_has_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, all different; a rank of another machine has all of its own."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert [cpu_share(config(cpus="1-4"), rank) for rank in (0, 1)] == ["1,2", "3,4"]
    assert [cpu_share(config(cpus="0-4"), rank) for rank in (0, 1)] == ["0,1", "2,3,4"]
    assert cpu_share(config(cpus="0-3", tensor_parallel_address="a:1"), 0) == "0-3"


def test_too_few_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of all ranks of this machine are counted."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(order, "allowed_cores", lambda: [0, 1, 2, 3])
    assert missing_cores(config(threads=2)) is None
    said = "2 ranks of 3 threads share 4 cores and slow each other down; set threads lower"
    assert missing_cores(config(threads=3)) == said
    assert missing_cores(config(threads=1, cpus="3")) is not None
    assert missing_cores(config(threads=4, tensor_parallel_address="a:1")) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3),
        ({"threads": 2}, 2),
        ({"cpus": "0"}, 3),
        ({"cpus": "0-1"}, 6),
        ({"tensor_parallel_address": "a:1"}, 6),
        ({"tensor_parallel": 8}, 1),
    ],
)
def test_ranks_that_were_not_told_share_the_cores(
    settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is pinned to its part, or alone on its machine, sees its own cores only."""
    monkeypatch.setattr(order, "default_threads", lambda: 6)
    assert threads_of(config(**settings)) == expected


def test_an_order_is_read_back() -> None:
    """It reaches its process as JSON."""
    order = Order(config=config(threads=3), rank=1, meeting="/tmp/x/store", seconds=2.5)
    assert Order.model_validate_json(order.model_dump_json()) == order
