"""What the draft engine counts: nodes, answers to verdicts, and sessions left without candidates."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from outrider.protocol.messages import Verdict
from tests.unit.draft_service.fakes import Bench, TableDrafter, request, verdict


class Page:
    """A core turned by hand, and its page of metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        drafter = TableDrafter(lambda tokens: ((tokens[-1] + 1, 10), (tokens[-1] + 2, 10)))
        self.bench = Bench(drafter, self.registry, expansions=4)
        self.stream, self.outbox = self.bench.open(request(task="code"))

    def verdict(self, committed: Verdict) -> None:
        """Tell the session what was committed."""
        self.bench.verdict(self.stream, committed)

    def turn(self, turns: int = 3) -> None:
        """Some turns of the loop."""
        for _ in range(turns):
            self.bench.step()

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of the page."""
        return self.registry.get_sample_value(f"outrider_draft_{name}", labels)


def test_nodes_that_are_sent_are_counted() -> None:
    """All of every block."""
    page = Page()
    page.turn()
    assert page.value("nodes_total", task="code") == sum(len(block) for block in page.outbox.blocks) > 2


def test_the_answer_to_a_verdict_is_timed() -> None:
    """From its arrival to the next block of the session; opening a session is no question."""
    page = Page()
    page.turn()
    assert page.value("lag_seconds_count") == 0
    page.verdict(verdict(3, 9))
    page.turn()
    assert page.value("lag_seconds_count") == 1
    assert page.value("lag_seconds_sum") > 0


def test_only_sent_nodes_are_wasted() -> None:
    """What died before it was sent cost the target nothing, and no more can be wasted than was sent."""
    page = Page()
    page.turn()
    sent = page.value("nodes_total", task="code")
    assert page.bench.step() is True  # grown and not sent yet
    sent_then = page.value("nodes_total", task="code")
    page.verdict(verdict(3, 99))
    page.turn(1)
    assert sent <= sent_then
    assert page.value("nodes_wasted_total", task="code") == sent_then


def test_verdicts_that_leave_nothing_to_verify_are_counted() -> None:
    """A token nobody proposed empties the tree; one that was proposed leaves what hangs below it."""
    page = Page()
    page.turn()
    page.verdict(verdict(3, 4))
    page.turn()
    assert page.value("starvations_total", task="code") == 0
    page.verdict(verdict(4, 99))
    page.turn()
    assert page.value("starvations_total", task="code") == 1
