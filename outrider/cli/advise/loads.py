"""Simulates the services under rising load. Imports the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli.advise.findings import Rate
from outrider.cli.advise.measuring import MeasuredOption
from outrider.cli.say import counter
from outrider.cli.up.plan import NONE
from simulator.report import Report
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology


def load_of(sessions: int, texts: int, tokens: int, temperature: float) -> Load:
    """A load of `sessions` at once that goes through `texts` texts, after a round from which the services
    learn."""
    return Load(
        sessions=sessions,
        rounds=max(1, texts // sessions),
        prompt_tokens=0,
        new_tokens=tokens,
        warm_up=1,
        warm_rounds=1,
        temperature=temperature,
    )


def simulate_load(measured: MeasuredOption, load: Load) -> Report:
    """One load on the services that `outrider up` starts with this draft."""
    topology = Topology(
        arm=ArmKind.AUTO, draft_replicas=0 if measured.option.draft == NONE else 1, max_sessions=load.sessions
    )
    return simulate(measured.profile, topology, load, measured.corpus)


def simulate_all(measured: Sequence[MeasuredOption], loads: Sequence[Load]) -> list[tuple[Rate, ...]]:
    """The result of every load with each option; shows progress by the number of simulated requests."""
    done, total = 0, len(measured) * sum(map(_requests, loads))
    simulated, found = counter("simulating", total), list[tuple[Rate, ...]]()
    for one in measured:
        rates: list[Rate] = []
        for load in loads:
            report = simulate_load(one, load)
            rates.append(
                Rate(
                    sessions=load.sessions,
                    tokens_per_second=report.tokens_per_second,
                    tokens_per_step=report.acceptance_length,
                    drafting=report.draft_wanted,
                )
            )
            done += _requests(load)
            simulated(done)
        found.append(tuple(rates))
    return found


def _requests(load: Load) -> int:
    """Number of requests of a load, those of the warm-up round included."""
    return load.sessions * (load.rounds + 1)
