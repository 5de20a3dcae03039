"""One run: a profile, a topology and a load in, a report out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from simulator.clients import Clients, ServedRequest
from simulator.cluster import Builder
from simulator.devices import StepTotals
from simulator.lockstep import run_lockstep
from simulator.profile import FOLDER, Profile
from simulator.report import Report, Run, summarise
from simulator.topology import ArmKind, Load, Topology
from simulator.traces import Corpus, load_corpus

Outcome = tuple[
    Sequence[ServedRequest], Sequence[StepTotals], Sequence[StepTotals], Mapping[str, Sequence[float]]
]
"""What clients got, the totals of targets and drafts, and the busy seconds of the processes' cores."""


def simulate(profile: Profile, topology: Topology, load: Load, corpus: Corpus | None = None) -> Report:
    """Run to the end of the load, with the profile's texts unless others are given."""
    corpus = corpus or load_corpus(FOLDER / profile.traces, load.temperature)
    way = _lockstep if topology.arm is ArmKind.LOCKSTEP else _services
    served, targets, drafts, cores = way(profile, topology, load, corpus)
    return summarise(
        Run(
            profile=profile.name,
            topology=topology,
            load=load,
            devices=topology.devices(profile.target_devices),
            served=served,
            targets=targets,
            drafts=drafts,
            cores=cores,
        )
    )


def _services(profile: Profile, topology: Topology, load: Load, corpus: Corpus) -> Outcome:
    """The project's own code."""
    jitter = Random(f"jitter {load.seed}")
    cluster = Builder(profile, topology, corpus, load.temperature, jitter).build()
    clients = Clients(cluster, load, topology.arm)
    clients.start()
    cluster.timeline.run(until=lambda: clients.done)
    busy = {kind: [core.busy for core in cores] for kind, cores in cluster.cores.items()}
    return clients.served, cluster.targets, cluster.drafts, busy


def _lockstep(profile: Profile, topology: Topology, load: Load, corpus: Corpus) -> Outcome:
    """The baseline: its replicas share nothing, so that one stands for all."""
    busy = min(topology.verify_replicas, load.sessions)
    run = run_lockstep(profile, corpus, load, -(-load.sessions // busy))
    idle = [StepTotals()] * (topology.verify_replicas - busy)
    cores: dict[str, list[float]] = {"verify": [], "draft": [], "orchestrator": []}
    return run.served * busy, [run.target] * busy + idle, [run.draft] * busy + idle, cores
