"""Service level objectives."""

from __future__ import annotations

import pytest

from outrider.cli.bench.slo import good, parse_slo
from outrider.protocol.errors import Unavailable
from tests.unit.cli.bench.worlds import outcome


def test_bounds_have_units() -> None:
    """Milliseconds or seconds."""
    bounds = parse_slo("ttft=500ms, tpot=0.05s,e2e=10s")
    assert [(bound.figure, bound.seconds) for bound in bounds] == [
        ("ttft", 0.5),
        ("tpot", 0.05),
        ("e2e", 10.0),
    ]
    assert list(map(str, bounds)) == ["ttft <= 500 ms", "tpot <= 50 ms", "e2e <= 10 s"]


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "itl=5ms", "ttft=-1s", "ttft=0s", "ttft=1.2.3s", "ttft=1s,ttft=2s"]
)
def test_what_is_no_bound_is_refused(text: str) -> None:
    """With an example, or with what is wrong."""
    with pytest.raises(ValueError, match=r"such as|above 0|twice"):
        parse_slo(text)


def test_all_bounds_have_to_be_met() -> None:
    """A bound itself is still good; a request without the figure keeps to it; a failed one is never good."""
    assert good(outcome(deliveries=(1.0,), tokens=1), parse_slo("ttft=1s,tpot=1ms"))
    assert not good(outcome(deliveries=(1.0, 3.0), tokens=2), parse_slo("ttft=1s,tpot=1s"))
    assert not good(outcome(error=Unavailable("gone")), parse_slo("e2e=100s"))
