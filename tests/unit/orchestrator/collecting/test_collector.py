"""What is collected, what is not, and that requests never notice."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from orchestrator.collecting.collector import MAX_WAITING, Collector
from orchestrator.collecting.files import RotatedFiles
from orchestrator.request.resolver import ResolvedRequest
from outrider.collected import PATTERN, Collected
from outrider.protocol.messages import SamplingParams
from outrider.telemetry.instruments import OrchestratorInstruments
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import PROMPT, Rig


class Files:
    """Remembers lines; waits while `held`, fails while `full`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.full = False

    def write(self, line: str) -> bool:
        """See RotatedFiles."""
        self.free.wait(10)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.lines.append(line)
        return True

    def close(self) -> None:
        """See RotatedFiles."""


def request(**fields: Any) -> ResolvedRequest:
    """One with three tokens of prompt."""
    sampling = SamplingParams(max_tokens=8)
    return ResolvedRequest(
        request_id="r", served=INFO, prompt=(1, 2, 3), sampling=sampling, task="code", **fields
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    """Of one test."""
    return CollectorRegistry()


def collector(files: Any, registry: CollectorRegistry, share: float = 1.0, drawn: float = 0.0) -> Collector:
    """One that writes to `files`."""
    collected = OrchestratorInstruments(registry).collected
    return Collector(files, share, collected, lambda: drawn)


def counted(registry: CollectorRegistry, outcome: str) -> float:
    """Continuations with an outcome."""
    return registry.get_sample_value("outrider_orchestrator_collected_total", {"outcome": outcome}) or 0.0


def test_a_line_holds_tokens_and_no_more(registry):
    """The prompt's length, the label and the vocabulary are all that is added."""
    files = Files()
    one = collector(files, registry)
    one.offer(request(), [1, 2, 3, 4, 5])
    one.close()
    (line,) = files.lines
    assert Collected.parse(line) == Collected(INFO.vocabulary_hash, "code", 3, (1, 2, 3, 4, 5))
    assert counted(registry, "written") == 1


@pytest.mark.parametrize(
    ("asked", "tokens", "draw"),
    [
        (request(do_not_collect=True), [1, 2, 3, 4], 0.0),
        (request(), [1, 2, 3], 0.0),
        (request(), [1, 2, 3, 4], 0.05),
    ],
    ids=["excluded", "nothing generated", "not of the share"],
)
def test_others_are_left_alone(asked, tokens, draw, registry):
    """Nothing of them is written or counted."""
    files = Files()
    one = collector(files, registry, share=0.05, drawn=draw)
    one.offer(asked, tokens)
    one.close()
    assert not files.lines
    assert sum(counted(registry, outcome) for outcome in ("written", "dropped", "failed")) == 0


def test_a_slow_disk_costs_lines_not_time(registry):
    """Beyond what may wait, continuations are dropped and counted; `offer` returns all the same."""
    files = Files()
    files.free.clear()
    one = collector(files, registry)
    for _ in range(MAX_WAITING + 10):
        one.offer(request(), [1, 2, 3, 4])
    assert counted(registry, "dropped") >= 9
    files.free.set()
    one.close()
    assert len(files.lines) == MAX_WAITING + 10 - counted(registry, "dropped")


def test_a_full_disk_costs_lines_and_no_more(registry):
    """Each is counted, and when there is room again, writing goes on."""
    files = Files()
    files.full = True
    one = collector(files, registry)
    for _ in range(5):
        one.offer(request(), [1, 2, 3, 4])
    until(lambda: counted(registry, "failed") == 5)
    files.full = False
    one.offer(request(), [1, 2, 3, 4])
    one.close()
    assert len(files.lines) == counted(registry, "written") == 1


def test_a_text_that_is_too_long_for_a_file_is_counted_as_dropped(registry, tmp_path):
    """The next one is written."""
    one = collector(RotatedFiles(str(tmp_path), 8 * 200), registry)
    one.offer(request(), [1, 2, 3, *range(200)])
    one.offer(request(), [1, 2, 3, 4])
    one.close()
    assert (counted(registry, "dropped"), counted(registry, "written")) == (1, 1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for the writing thread."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_line_that_was_cut_is_no_continuation():
    """Nor is anything else that was not written by us."""
    line = Collected("v", "code", 1, (1, 2)).line()
    assert Collected.parse(line) is not None
    for wrong in (
        line[:-4],
        "",
        "[]",
        "{}",
        line.replace('"prompt":1', '"prompt":2'),
        line.replace("[1,", "[-1,"),
        line.replace('"prompt":1', '"prompt":Infinity'),
        "[" * 100_000,
    ):
        assert Collected.parse(wrong) is None


async def test_what_is_served_is_collected(tmp_path: Path):
    """Through the services: prompt and text of requests that did not ask to be left out."""
    folder = tmp_path / "kept"
    settings: dict[str, Any] = {"collect": str(folder), "collect_share": 1.0}
    async with Rig(FakeVerify(), FakeDraft(), **settings) as rig:
        await rig.generate(task="code")
        await rig.generate(task="code", do_not_collect=True)
    lines = "".join(path.read_text() for path in folder.glob(PATTERN)).splitlines()
    (kept,) = [Collected.parse(line) for line in lines]
    assert kept is not None
    assert list(kept.tokens) == [*PROMPT, *continuation(PROMPT, 40)]
    assert (kept.prompt, kept.task) == (len(PROMPT), "code")


async def test_by_default_nobody_collects():
    """No folder, no thread."""
    async with Rig(FakeVerify()) as rig:
        assert rig.orchestrator.servicer.collector is None


def test_real_files_take_what_the_collector_writes(tmp_path, registry):
    """The two together."""
    one = collector(RotatedFiles(str(tmp_path), 1 << 20), registry)
    for task in range(3):
        one.offer(request(), [1, 2, 3, task])
    one.close()
    (path,) = tmp_path.glob(PATTERN)
    assert len(path.read_text().splitlines()) == 3
