"""Builds the replicas, devices, cores and links of a topology from a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from outrider.config import DraftConfig, VerifyConfig
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import PagePool
from outrider.protocol.messages import ModelInfo
from outrider.rpc.queues import deliver
from outrider.telemetry.instruments import DraftInstruments, VerifyInstruments
from simulator.devices import Accelerator, Core, Device, Floating, Place, StepTotals
from simulator.drafter import ScriptedDrafter, TimedLookup
from simulator.network import Host
from simulator.orchestrator import SimulatedFleet
from simulator.profile import Profile, interpolate
from simulator.replica import SimulatedReplica
from simulator.target import ScriptedRunner
from simulator.timeline import Timeline
from simulator.topology import Topology
from simulator.traces import Corpus, Script
from verify_service.core import CoreSettings, VerifyCore
from verify_service.speculation.cost_model import CostModel, measuring_points


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that runs; `scripts` are the texts of the sessions so far, by session number."""

    timeline: Timeline
    corpus: Corpus
    scripts: dict[int, Script]
    fleet: SimulatedFleet
    orchestrators: list[Host]
    """The event loops of the orchestrators."""
    client: Host

    @property
    def targets(self) -> list[StepTotals]:
        """Sums over the steps of each target."""
        return [replica.totals for replica in self.fleet.verify.values()]

    @property
    def drafts(self) -> list[StepTotals]:
        """Sums over the steps of each draft."""
        return [replica.totals for replica in self.fleet.draft.values()]

    def count_from_now(self) -> None:
        """Set all sums to zero."""
        for totals in (*self.targets, *self.drafts):
            totals.clear()


@dataclass(slots=True)
class Builder:
    """Makes the parts of one cluster."""

    profile: Profile
    topology: Topology
    corpus: Corpus
    temperature: float
    timeline: Timeline = field(default_factory=Timeline)
    scripts: dict[int, Script] = field(default_factory=dict)
    _cores: list[Core] = field(default_factory=list)
    """The cores of a machine with two; otherwise empty."""

    def build(self) -> Cluster:
        """The cluster, before its first request."""
        if self.profile.cores == "two":
            self._cores = [Core(self.timeline), Core(self.timeline)]
        orchestrators = [
            self._host(self._cores[1] if self._cores else Core(self.timeline))
            for _ in range(self.topology.orchestrators)
        ]
        verifies = [f"verify-{i:03}" for i in range(self.topology.verify_replicas)]
        verify = {name: self._verify(name, self._place(0)) for name in verifies}
        drafts = [f"draft-{i:03}" for i in range(self.topology.drafts)]
        draft = {name: self._draft(name, self._place(1)) for name in drafts}
        return Cluster(
            self.timeline,
            self.corpus,
            self.scripts,
            SimulatedFleet(verify, draft, self._served(), self.topology.rtt / 2),
            orchestrators,
            # Clients are many and on other machines, unless one small machine runs everything.
            self._host(Floating(self._cores))
            if self._cores
            else Host(self.timeline, Accelerator(self.timeline)),
        )

    def _served(self) -> ModelInfo:
        return ModelInfo(
            model=self.profile.name,
            vocabulary_hash="",
            vocabulary_size=self.corpus.vocabulary_size,
            context_length=self.profile.context_length,
            max_sessions=self.topology.max_sessions,
        )

    def _place(self, pinned: int) -> Place:
        """Where an engine runs: on the core that it is pinned to, or on an accelerator with its own core."""
        if self._cores:
            return Place(self._cores[pinned], self._cores[pinned], self._cores[1 - pinned])
        return Place(Accelerator(self.timeline), Core(self.timeline))

    def _host(self, core: Device) -> Host:
        times = self.profile.host
        return Host(self.timeline, core, times.send, times.receive, times.rewarm)

    def _verify(self, name: str, place: Place) -> SimulatedReplica:
        config = VerifyConfig.model_validate({"max_sessions": self.topology.max_sessions})
        pages = config.max_sessions * -(-self.profile.context_length // PAGE_SIZE)
        times = self.profile.target_times(self.temperature)
        runner = ScriptedRunner(
            place, times, self.scripts, self.corpus.vocabulary_size, PagePool(pages, PAGE_SIZE)
        )
        points = measuring_points(config.max_step_tokens)
        alone = [(count, interpolate(self.profile.target_forward, count)) for count in points]
        seconds = [time - times.helped(count, 1, time, drafting=False) / 2 for count, time in alone]
        core = VerifyCore(
            runner,
            CostModel(points, seconds, config.max_step_tokens),
            CoreSettings.of(config, replace(self._served(), replica=name), config.max_step_tokens),
            VerifyInstruments(CollectorRegistry()),
            deliver,
            self.timeline.clock,
            self.timeline.clock,
        )
        return self._replica(name, place, core.turn, runner.totals)

    def _draft(self, name: str, place: Place) -> SimulatedReplica:
        sessions = self.topology.max_sessions * self.topology.verify_replicas
        config = DraftConfig.model_validate({"max_sessions": sessions})
        drafter = self._drafter(place, config)
        core = DraftCore(
            drafter,
            config,
            DraftInstruments(CollectorRegistry()),
            deliver,
            clock=self.timeline.clock,
            wall_ns=lambda: int(self.timeline.now * 1e9),
        )
        return self._replica(name, place, core.turn, drafter.totals)

    def _replica(
        self, name: str, place: Place, turn: Callable[[Sequence[Any]], float | None], totals: StepTotals
    ) -> SimulatedReplica:
        host = self._host(place.core)
        return SimulatedReplica(name, self.timeline, host, turn, totals, self.profile.host.wake)

    def _drafter(self, place: Place, config: DraftConfig) -> ScriptedDrafter | TimedLookup:
        times = self.profile.draft_times(self.temperature)
        if self.profile.draft_kind == "lookup":
            return TimedLookup(place, times, config)
        return ScriptedDrafter(place, times, self.scripts, self.corpus, self.profile.context_length)
