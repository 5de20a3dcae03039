"""Runs one simulation: takes a profile, a topology and a load, and returns a report."""

from __future__ import annotations

from outrider.protocol.errors import ConfigError
from simulator.clients import Clients
from simulator.cluster import Builder
from simulator.devices import StepTotals
from simulator.lockstep import run_lockstep
from simulator.profile import FOLDER, Profile
from simulator.report import Report, Run, summarise
from simulator.topology import ArmKind, Load, Topology
from simulator.traces import Corpus, load_corpus


def simulate(profile: Profile, topology: Topology, load: Load, corpus: Corpus | None = None) -> Report:
    """Simulate a load to its end, with the profile's texts unless others are given.

    Raises:
        ConfigError: the profile's models do not take texts of that length, or there is nothing to simulate.
    """
    replicas = topology.verify_replicas, topology.orchestrators
    if min(load.sessions, load.rounds, load.new_tokens, *replicas) < 1:
        raise ConfigError(
            "sessions, rounds, new tokens, verify replicas and orchestrators must each be 1 or more"
        )
    if min(topology.draft_replicas, topology.rtt, load.prompt_tokens) < 0:
        raise ConfigError("draft replicas, round trips and prompt tokens must each be 0 or more")
    if load.prompt_tokens + load.new_tokens > profile.context_length:
        raise ConfigError(
            f"a prompt of {load.prompt_tokens} tokens and {load.new_tokens} new ones are more than the "
            f"{profile.context_length} of profile {profile.name}; ask for less"
        )
    corpus = corpus or load_corpus(FOLDER / profile.traces, load.temperature)
    way = _lockstep if topology.arm is ArmKind.LOCKSTEP else _services
    return summarise(way(profile, topology, load, corpus))


def _services(profile: Profile, topology: Topology, load: Load, corpus: Corpus) -> Run:
    """Run the project's own code."""
    cluster = Builder(profile, topology, corpus, load.temperature).build()
    clients = Clients(cluster, load, topology.arm)
    clients.start()
    cluster.timeline.run(until=lambda: clients.done)
    return Run(profile, topology, load, clients.served, cluster.targets, cluster.drafts)


def _lockstep(profile: Profile, topology: Topology, load: Load, corpus: Corpus) -> Run:
    """Run the baseline. Its replicas share nothing, so one stands for all."""
    busy = min(topology.verify_replicas, load.sessions)
    run = run_lockstep(profile, corpus, load, -(-load.sessions // busy))
    idle = [StepTotals()] * (topology.verify_replicas - busy)
    targets, drafts = ([totals] * busy + idle for totals in (run.target, run.draft))
    return Run(profile, topology, load, run.served * busy, targets, drafts)
