"""Floods of one caller: another caller's small requests are served, and memory comes back."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.harness.attacks import NAMES
from tests.faults.harness.bystander import Felt, feel
from tests.integration.cluster import Process

KEPT_MIB = 200.0
"""Growth that an allocator may keep."""
TOKENS = ("the-attacker", "the-bystander")
QUICK = ("n = 16, long", "many small requests")


@pytest.fixture(scope="module")
def orchestrator(cluster, demo, tmp_path_factory) -> Process:
    """An orchestrator that knows two callers."""
    known = tmp_path_factory.mktemp("volume") / "tokens"
    known.write_text("\n".join(TOKENS) + "\n")
    replicas = {"verify": demo.verify.endpoint, "draft": demo.draft("real")}
    return cluster.serve("orchestrator", auth_tokens_file=known, **replicas).wait_ready()


def check(felt: Felt) -> None:
    """No small request was lost, and nothing was kept; docs/faults.md has how long they take."""
    assert felt.lost == []
    assert felt.after < felt.before + KEPT_MIB, felt.row()


@pytest.mark.parametrize("attack", QUICK)
def test_small_requests_are_served_beside_a_flood(orchestrator, attack):
    """While one caller floods the orchestrator, another one's small requests are served."""
    check(asyncio.run(feel(attack, orchestrator.endpoint, orchestrator.pid, 4.0, TOKENS)))


@pytest.mark.slow
@pytest.mark.parametrize("attack", [name for name in NAMES if name not in QUICK])
def test_small_requests_are_served_beside_other_floods(orchestrator, attack):
    """The same for every other way of asking for too much."""
    check(asyncio.run(feel(attack, orchestrator.endpoint, orchestrator.pid, 10.0, TOKENS)))
