"""Computes where the time of each step went, for spans and for the timeline picture.

Clocks of different machines differ. Each lane uses the clock of the service that did the work, and wire bars
have at least zero length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from outrider.protocol.messages import Origin, StepNodes, TokenBlock, Verdict

MAX_EVENTS = 20_000
MAX_LINKS = 128
MAX_STEP_EVENTS = 128
"""Most bars that are kept for one step. The last ones are kept."""


class Lane(IntEnum):
    """Lane of the picture; the numbers are those of the protocol."""

    DRAFT = 1
    WIRE = 2
    VERIFY = 3


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One bar."""

    lane: Lane
    start_ns: int
    duration_us: int
    name: str
    step: int
    nodes: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step as the orchestrator saw it: from the verdict before it (or the opening) to its own."""

    verdict: Verdict
    start_ns: int
    end_ns: int
    drafted: int
    """Nodes that arrived meanwhile."""
    draft_us: int
    """Time that the draft spent on these nodes, in microseconds."""
    wire_us: int
    """The rest of the step's time after queue, forward and sample, in microseconds."""
    links: tuple[str, ...]
    """Traceparents of the drafts' spans."""
    events: tuple[TimelineEvent, ...] = ()
    """The bars of the step."""

    @property
    def nodes(self) -> StepNodes:
        """The verified nodes; empty unless the session was opened with `record_steps`."""
        return self.verdict.nodes or StepNodes((), (), ())

    @property
    def accepted(self) -> list[int]:
        """Indices of the nodes that were committed, in order."""
        nodes, path = self.nodes, list[int]()
        index_of = {key: index for index, key in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
        for token in self.verdict.tokens[: self.verdict.accepted]:
            index = index_of.get((path[-1] if path else -1, token))
            if index is None:
                break
            path.append(index)
        return path

    @property
    def bonus(self) -> int | None:
        """The token that the target chose after the accepted nodes; None when one of them ended the text."""
        tokens = self.verdict.tokens
        return tokens[-1] if len(tokens) > len(self.accepted) else None

    @property
    def origins(self) -> list[Origin]:
        """For each committed token, who proposed it first."""
        accepted = [self.nodes.origins[index] for index in self.accepted]
        return accepted + [Origin.TARGET] * (len(self.verdict.tokens) - len(accepted))


class StepRecorder:
    """Collects blocks between verdicts; times are nanoseconds since the Unix epoch."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._step = 0
        self._drafted = self._draft_us = 0
        self._links: list[str] = []
        self._bars: deque[TimelineEvent] = deque(maxlen=MAX_STEP_EVENTS)
        """Bars since the last verdict."""
        self.events: list[TimelineEvent] = []

    def reopened(self, now_ns: int) -> None:
        """A verify session begins; its first step starts now."""
        self._start_ns = now_ns

    def add_block(self, block: TokenBlock, now_ns: int) -> None:
        """A block arrived."""
        nodes, step = len(block), self._step + 1
        self._drafted += nodes
        self._draft_us += block.expand_micros
        if block.traceparent and len(self._links) < MAX_LINKS:
            self._links.append(block.traceparent)
        if block.expand_start_unix_nano:
            sent_ns = block.expand_start_unix_nano + block.expand_micros * 1000
            self._add(Lane.DRAFT, block.expand_start_unix_nano, sent_ns, "block", step, nodes)
            self._add(Lane.WIRE, sent_ns, now_ns, "block", step, nodes)

    def add_verdict(self, verdict: Verdict, now_ns: int) -> Step:
        """A verdict arrived; return the step that it ends."""
        times = verdict.times
        accounted = times.queue_micros + times.forward_micros + times.sample_micros
        start_ns, self._start_ns = self._start_ns, now_ns
        wire_us = max(0, (now_ns - start_ns) // 1000 - accounted)
        if times.forward_start_unix_nano:
            sent_ns = times.forward_start_unix_nano + (times.forward_micros + times.sample_micros) * 1000
            nodes, accepted = verdict.verified, verdict.accepted
            self._add(
                Lane.VERIFY, times.forward_start_unix_nano, sent_ns, "verify", verdict.step, nodes, accepted
            )
            self._add(Lane.WIRE, sent_ns, now_ns, "verdict", verdict.step, nodes, accepted)
        links, bars = tuple(self._links), tuple(self._bars)
        step = Step(verdict, start_ns, now_ns, self._drafted, self._draft_us, wire_us, links, bars)
        self._step = verdict.step
        self._drafted = self._draft_us = 0
        self._links = []
        self._bars.clear()
        return step

    def _add(
        self, lane: Lane, start_ns: int, end_ns: int, name: str, step: int, nodes: int, accepted: int = 0
    ) -> None:
        duration_us = max(0, end_ns - start_ns) // 1000
        bar = TimelineEvent(lane, start_ns, duration_us, name, step, nodes, accepted)
        self._bars.append(bar)
        if len(self.events) < MAX_EVENTS:
            self.events.append(bar)
