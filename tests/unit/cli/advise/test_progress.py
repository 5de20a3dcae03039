"""What is said while it works."""

from __future__ import annotations

import io

from outrider.cli.advise.progress import WorkProgress


def test_the_rest_is_estimated_from_what_is_done() -> None:
    """A quarter took three seconds, so the others take nine."""
    times = iter([10.0, 13.0, 22.0])
    stream = io.StringIO()
    done = WorkProgress(lambda: next(times), stream).counter("simulating", 8)
    done(2)
    done(8)
    assert stream.getvalue().splitlines() == [
        "outrider: simulating: 25%, about 9 s left",
        "outrider: simulating: 100%, about 0 s left",
    ]
