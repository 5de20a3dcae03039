"""The wall clock jumps; leases and deadlines go by a clock that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.harness import watched
from tests.integration.client import Client, Generation, eventually, verify_info
from tests.integration.cluster import DEMO_TARGET, Cluster, Process

WINDOW = "test-clock"
HOUR = 3600.0


@dataclass
class Alone:
    """A target whose clock can be moved, without a draft."""

    verify: Process
    client: Client

    def jump(self, seconds: float) -> None:
        """Move the wall clock of the verify replica."""
        watched.ask(WINDOW, self.verify.pid, f"clock {seconds}")

    def keep(self) -> Generation:
        """A turn whose session is kept."""
        generation = self.client.generate(list(range(5, 45)), max_tokens=8, fields={"keep_session": True})
        assert generation.complete.session
        return generation


@pytest.fixture
def alone(tmp_path, request) -> Iterator[Alone]:
    """Leases of as many seconds as the test says."""
    cluster = Cluster(tmp_path, {"FAULTS_WINDOW": WINDOW}, watched.__name__)
    verify = cluster.serve(
        "verify", model=DEMO_TARGET, dtype="float32", lease_seconds=request.param, prefix_cache=False
    ).wait_ready()
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint).wait_ready()
    yield Alone(verify, Client(orchestrator.endpoint))
    cluster.stop()


@pytest.mark.parametrize("alone", [2.0], indirect=True)
def test_a_clock_that_goes_back_keeps_no_lease_longer(alone):
    """A session kept for two seconds gives its pages back, though its clock says an hour earlier."""
    alone.keep()
    alone.jump(-HOUR)
    eventually(
        lambda: verify_info(alone.verify.endpoint).pages_free == verify_info(alone.verify.endpoint).pages,
        "the lease has ended",
    )


@pytest.mark.parametrize("alone", [60.0], indirect=True)
def test_a_clock_that_goes_forward_ends_no_lease_early(alone):
    """The next turn finds its keys and values within a lease of a minute, after a jump of an hour."""
    first = alone.keep()
    alone.jump(HOUR)
    turn = [*range(5, 45), *first.tokens, 7]
    second = alone.client.generate(turn, max_tokens=4, fields={"session": first.complete.session})
    assert second.complete.usage.cached_tokens >= 40
