"""What is said while it works."""

from __future__ import annotations

import pytest

from outrider.cli.say import counter


def test_the_rest_is_estimated_from_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter took three seconds, so the others take nine."""
    times = iter([10.0, 13.0, 22.0])
    done = counter("simulating", 8, lambda: next(times))
    done(2)
    done(8)
    assert capsys.readouterr().err.splitlines() == [
        "outrider: simulating: 25%, about 9 s left",
        "outrider: simulating: 100%, about 0 s left",
    ]
