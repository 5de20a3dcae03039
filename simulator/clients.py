"""Clients: they send requests, read tokens, and note the times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from orchestrator.observing.statistics import Statistics
from orchestrator.request.resolver import ResolvedRequest
from outrider.protocol.messages import SamplingParams, Verdict
from simulator.cluster import Cluster
from simulator.network import Link
from simulator.orchestrator import SimulatedGeneration
from simulator.timeline import Fiber, current, pause
from simulator.topology import ArmKind, Load
from simulator.traces import Corpus, Script, replay, write_script


class Arrival(NamedTuple):
    """Tokens of one verdict at the client."""

    time: float
    tokens: int
    forward: float
    """Seconds of the target's step that committed them."""
    draft_wanted: bool = True
    """True when the target asked for drafts for the next round."""


@dataclass(slots=True)
class ServedRequest:
    """One request as its client saw it; times in virtual seconds."""

    asked: float
    expected: tuple[int, ...]
    statistics: Statistics = field(default_factory=Statistics)
    tokens: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def read(self, now: float, verdict: Verdict) -> None:
        """Note a verdict's tokens, which arrive now."""
        self.tokens.extend(verdict.tokens)
        seconds = (verdict.times.forward_micros + verdict.times.sample_micros) * 1e-6
        self.arrivals.append(Arrival(now, len(verdict.tokens), seconds, verdict.draft_wanted))

    @property
    def complete(self) -> bool:
        """True when all tokens have come."""
        return len(self.tokens) >= len(self.expected)

    @property
    def ended(self) -> float:
        """Time at which the last token came."""
        return self.arrivals[-1].time

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0].time - self.asked

    @property
    def decoding(self) -> float:
        """Seconds from the first verdict to the last."""
        return self.ended - self.arrivals[0].time

    @property
    def per_token(self) -> float:
        """Mean seconds per token after those of the first verdict."""
        later = sum(arrival.tokens for arrival in self.arrivals[1:])
        return self.decoding / later if later else 0.0


class Texts:
    """Writes the sessions' texts. They depend only on the load, not on what is simulated."""

    def __init__(self, corpus: Corpus, load: Load) -> None:
        self._corpus = corpus
        self._load = load
        self._random = Random(f"texts {load.seed}")
        self._written = 0

    def next(self) -> Script:
        """The next session's text."""
        load, number = self._load, self._written
        self._written += 1
        if load.prompt_tokens == 0:
            return replay(self._corpus, number, load.new_tokens)
        return write_script(self._corpus, number, load.prompt_tokens, load.new_tokens, self._random)


class Clients:
    """All clients of a cluster; `served` are the requests that were answered after the warm-up."""

    def __init__(self, cluster: Cluster, load: Load, arm: ArmKind) -> None:
        self.served: list[ServedRequest] = []
        self._cluster = cluster
        self._load = load
        self._arm = arm
        self._texts = Texts(cluster.corpus, load)
        self._asked = 0

    @property
    def done(self) -> bool:
        """True when all requests that count have been answered."""
        return len(self.served) == self._load.sessions * self._load.rounds

    def start(self) -> None:
        """Begin to send requests, in a fiber."""
        self._start(self._ask_everything)

    def _ask_everything(self) -> None:
        """Warm up, then send all requests that count."""
        for _ in range(self._load.warm_up):
            self._ask([])
        self._ask_at_once(self._load.warm_rounds, [])
        self._cluster.count_from_now()
        self._ask_at_once(self._load.rounds, self.served)

    def _ask_at_once(self, rounds: int, kept: list[ServedRequest]) -> None:
        """Send `rounds` requests of every session, one after the other in each, and wait for the last."""
        resume, left = current(), self._load.sessions

        def ask_one_by_one() -> None:
            nonlocal left
            for _ in range(rounds):
                self._ask(kept)
            left -= 1
            if not left:
                self._cluster.timeline.after(0.0, resume)

        for _ in range(self._load.sessions):
            self._start(ask_one_by_one)
        pause()

    def _ask(self, kept: list[ServedRequest]) -> None:
        """Send a request, wait for its last token, and append it to `kept`. To be called in a fiber."""
        cluster = self._cluster
        script = self._texts.next()
        cluster.scripts[script.number] = script
        orchestrator = cluster.orchestrators[self._asked % len(cluster.orchestrators)]
        self._asked += 1
        served, resume = ServedRequest(cluster.timeline.now, script.generated), current()

        def read(verdict: Verdict) -> None:
            served.read(cluster.timeline.now, verdict)
            if served.complete:
                resume()

        def send_back(verdict: Verdict) -> None:
            cluster.client.loop.do(cluster.client.receive_seconds, partial(read, verdict))

        request = _request(script, cluster, self._arm)
        generation = SimulatedGeneration(request, cluster.fleet, cluster.timeline, orchestrator, send_back)
        served.statistics = generation.session.statistics
        Link(cluster.timeline, cluster.client, orchestrator).send(generation.start)
        pause()
        kept.append(served)

    def _start(self, asking: Callable[[], None]) -> None:
        self._cluster.timeline.after(0.0, Fiber(asking).resume)


def _request(script: Script, cluster: Cluster, arm: ArmKind) -> ResolvedRequest:
    return ResolvedRequest(
        request_id=str(script.number),
        served=cluster.fleet.served,
        prompt=script.tokens[: script.prompt_length],
        sampling=SamplingParams(max_tokens=len(script.generated), ignore_eos=True),
        mode=arm.mode,
    )
