"""What the draft engine counts: nodes by depth, answers to verdicts, and sessions left without candidates."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from draft_service.engine import DraftEngine
from outrider.config import DraftConfig
from outrider.telemetry.instruments import DraftInstruments
from tests.unit.draft_service.fakes import ListOutbox, TableDrafter, request, verdict


class Bench:
    """An engine turned by hand, and its page; every look at the clock is one millisecond later."""

    def __init__(self) -> None:
        ticks = iter(range(10**9))
        self.registry = CollectorRegistry()
        self.outbox = ListOutbox(1000)
        self.engine = DraftEngine(
            TableDrafter(lambda tokens: ((tokens[-1] + 1, 10), (tokens[-1] + 2, 10))),
            DraftConfig(expansions=4),
            DraftInstruments(self.registry),
            clock=lambda: next(ticks) * 1e-3,
        )
        self.key = self.engine.open(request(task="code"), self.outbox)

    def turn(self, turns: int = 3) -> None:
        """Some turns of the loop."""
        for _ in range(turns):
            self.engine.step()

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of the page."""
        return self.registry.get_sample_value(f"outrider_draft_{name}", labels)


def test_nodes_are_counted_by_the_position_that_they_are_for() -> None:
    """What was sent, by depth below the last committed token, adds up to all nodes."""
    bench = Bench()
    bench.turn()
    nodes = sum(len(block) for block in bench.outbox.blocks)
    depths = [bench.value("position_drafted_total", task="code", position=str(i)) for i in range(1, 17)]
    assert bench.value("nodes_total", task="code") == nodes == sum(depths)
    assert depths[0] == 2
    assert depths[1] > 0


def test_the_answer_to_a_verdict_is_timed() -> None:
    """From its arrival to the next block of the session; opening a session is no question."""
    bench = Bench()
    bench.turn()
    assert bench.value("lag_seconds_count") == 0
    bench.engine.verdict(bench.key, verdict(3, 9))
    bench.turn()
    assert bench.value("lag_seconds_count") == 1
    assert bench.value("lag_seconds_sum") > 0


def test_only_sent_nodes_are_wasted() -> None:
    """What died before it was sent cost the target nothing, and no more can be wasted than was sent."""
    bench = Bench()
    bench.turn()
    sent = bench.value("nodes_total", task="code")
    assert bench.engine.step() is True  # grown and not sent yet
    sent_then = bench.value("nodes_total", task="code")
    bench.engine.verdict(bench.key, verdict(3, 99))
    bench.turn(1)
    assert sent <= sent_then
    assert bench.value("nodes_wasted_total", task="code") == sent_then


def test_verdicts_that_leave_nothing_to_verify_are_counted() -> None:
    """A token nobody proposed empties the tree; one that was proposed leaves what hangs below it."""
    bench = Bench()
    bench.turn()
    bench.engine.verdict(bench.key, verdict(3, 4))
    bench.turn()
    assert bench.value("starvations_total", task="code") == 0
    bench.engine.verdict(bench.key, verdict(4, 99))
    bench.turn()
    assert bench.value("starvations_total", task="code") == 1
