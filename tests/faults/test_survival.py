"""Everything at once: mixed requests while processes die, hang and come back and connections break.

A failure prints its seed; `pytest tests/faults/test_survival.py --fault-seed N` draws the same requests and
faults again.
"""

from __future__ import annotations

import json

import pytest

from tests.faults.harness.plan import Kind, Manner, Mix
from tests.faults.harness.run import Options, run
from tests.faults.harness.system import System

SHORT = Mix(spacing=3, longest=2.0)
"""Few requests, and a fault every few of them."""
MANY_KINDS = 1844
"""A seed that begins with nine kinds of faults; an orchestrator and a verify replica are killed."""
LONG = Mix(
    manners={**Mix().manners, Manner.DISAPPEAR: 1},
    kinds={**Mix().kinds, Kind.FREEZE: 4},
    longest=9.0,
    spacing=25,
)
"""Freezes longer than three probes move sessions; clients may be lost to keepalive alone."""


def survives(options: Options) -> None:
    """Run, and fail with the figures when something did not hold."""
    report = run(options)
    report.write(options.folder / "report.json")
    assert not report.violations, json.dumps(report.summary(), indent=1)
    assert report.recoveries, "no fault was carried out"


def test_a_few_dozen_requests_survive_faults(tmp_path, fault_seed):
    """Every token is right, no request is lost and nothing is left behind."""
    seed = fault_seed or MANY_KINDS
    few = Options(seed=seed, requests=90, cases=10, tokens=32, long_prompts=1, mix=SHORT, folder=tmp_path)
    survives(few)


def test_a_rolling_restart_fails_no_request(tmp_path):
    """Every process of each kind is replaced under load: no call fails and every token is right."""
    readers = Mix(manners={Manner.READ: 1})

    async def roll(system: System) -> None:
        for kind in ("orchestrator", "verify", "draft"):
            await system.roll(kind)

    report = run(Options(seed=1, workers=4, cases=6, tokens=32, mix=readers, folder=tmp_path), roll)
    assert not report.violations, json.dumps(report.summary(), indent=1)
    assert report.counts["resumed"] == 0
    assert report.finished


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [101, 102])
def test_two_thousand_requests_survive_faults(tmp_path, fault_seed, seed):
    """The same with 2,000 requests in two runs, clients that disappear, and long partitions."""
    survives(Options(seed=fault_seed or seed, requests=1000, cases=60, tokens=64, mix=LONG, folder=tmp_path))
