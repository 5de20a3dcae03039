"""Steps for which there is no memory, on a GPU or the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from outrider.engine.runner import Segment
from outrider.protocol.errors import StaleHandle, Unavailable
from outrider.protocol.messages import SamplingParams
from tests.unit.verify_service.fakes import Bench, FakeRunner, events, greedy_text, opening, text
from verify_service.mailbox import Closed


class NarrowRunner(FakeRunner):
    """Has memory for steps of so many tokens only."""

    def __init__(self, room: int, error: Exception) -> None:
        super().__init__()
        self._room, self._error = room, error

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits of the wanted entries; an error in the middle of a step that is too long."""
        rows = super().forward(segments)
        if sum(self.steps[-1]) > self._room:
            raise self._error
        return rows


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee ..."), MemoryError()]


@pytest.mark.parametrize("error", NO_MEMORY)
def test_after_a_step_without_memory_steps_are_shorter(error: Exception) -> None:
    """Open sessions are to be opened again, and nothing that was computed is used again. Then they get their
    texts; no page is lost. The step is counted."""
    bench = Bench(NarrowRunner(8, error))
    early, kept = bench.open(opening((4, 5, 6, 7, 8, 9))), bench.open(opening((1, 2, 3, 4, 5, 6)))
    handle = bench.close(kept, keep=True).handle
    assert handle is not None
    with capture_logs() as logs:
        late = bench.open(opening(range(1, 13)))
    for stream in (early, late):
        *_, ended = events(stream)
        assert isinstance(ended, Unavailable)
    (line,) = logs
    assert line["event"].startswith("a step of 9 tokens found no memory (")
    assert line["event"].endswith("steps have at most 2; lower max_step_tokens or kv_tokens")
    assert bench.registry.get_sample_value("outrider_verify_steps_without_memory_total") == 1
    assert bench.core.statistics.free == bench.core.statistics.total
    request = opening(range(1, 13), sampling=SamplingParams(max_tokens=4))
    again = bench.open(request)
    bench.run()
    opened, *received = events(again)
    assert opened.cached_length == 0
    assert text(received) == greedy_text(range(1, 13), 4)
    assert max(map(sum, bench.runner.steps[-5:])) <= 2
    bench.close(again)
    bench.core.turn([])
    with pytest.raises(StaleHandle):
        bench.core.handles.release(handle)
    assert bench.core.statistics.used == 0


def test_a_finished_session_ends_as_ever_after_a_step_without_memory() -> None:
    """It has its text; only what it would leave for a next turn is gone."""
    bench = Bench(NarrowRunner(10, MemoryError()))
    done = bench.open(opening((4, 5), sampling=SamplingParams(max_tokens=1)))
    with capture_logs():
        bench.open(opening(range(1, 13)))
    assert bench.close(done, keep=True) == Closed(None)


@pytest.mark.parametrize(
    ("room", "alone", "error"),
    [(0, True, NO_MEMORY[0]), (10, False, NO_MEMORY[0]), (10, True, RuntimeError("CUDA error: device-side"))],
)
def test_other_errors_of_a_step_end_the_engine(room: int, alone: bool, error: Exception) -> None:
    """Also a step of one token without memory, and one of several ranks, which they cannot take back."""
    bench = Bench(NarrowRunner(room, error))
    bench.core._settings = replace(bench.core._settings, alone=alone)
    with pytest.raises(type(error)):
        bench.open(opening(range(1, 2 if room == 0 else 13)))
