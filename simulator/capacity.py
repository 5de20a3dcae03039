"""Simulates the studies of docs/capacity.md: `python -m simulator capacity`.

worth     one draft device next to one target, against two devices without drafts or with both models
distance  round trips between the services
fan-out   verify replicas that share one draft replica
host      what the services' own processor time costs on a fast target
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from simulator.modelled import modelled
from simulator.profile import Profile
from simulator.report import HEADER, line
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology

STUDIES = ("worth", "distance", "fan-out", "host")
SESSIONS = (1, 4, 16, 64, 256, 1000)
ROUND_TRIPS = (0.0, 0.001, 0.005, 0.02)
FAN_OUT = (1, 2, 4, 8, 16)
HOST_FACTORS = (1.0, 0.5, 0.25, 0.0)
TEMPERATURE = 0.7
SESSIONS_PER_ORCHESTRATOR = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One run; `label` distinguishes curves of the same arm."""

    study: str
    label: str
    profile: Profile
    topology: Topology
    load: Load


def cases() -> Iterator[Case]:
    """All runs of all studies."""
    yield from _worth("h100-8b-1b", replicas_without_drafts=2)
    yield from _worth("h100-70b-1b", replicas_without_drafts=1)
    yield from _distance("h100-8b-1b")
    yield from _distance("h100-70b-1b")
    yield from _fan_out("h100-8b-1b")
    yield from _fan_out("h100-70b-1b")
    yield from _host("h100-8b-1b")


def run(folder: Path, studies: Sequence[str]) -> None:
    """Run studies; write the figures of each to a file with its name."""
    print(HEADER)
    for study in studies:
        rows: list[Mapping[str, object]] = []
        for case in cases():
            if case.study == study:
                report = simulate(case.profile, case.topology, case.load)
                print(f"{line(report)}  {study}: {case.label}", flush=True)
                rows.append({"study": study, "label": case.label, **asdict(report)})
        (folder / f"{study}.json").write_text(json.dumps(rows, indent=1) + "\n")


def _worth(name: str, replicas_without_drafts: int) -> Iterator[Case]:
    profile = modelled(name)
    for sessions in SESSIONS:
        load = _load(sessions)
        for arm in (ArmKind.LOCKSTEP, ArmKind.OFF, ArmKind.AUTO):
            replicas = 1 if arm is ArmKind.AUTO else replicas_without_drafts
            yield Case("worth", arm.value, profile, _topology(arm, sessions, verify=replicas), load)


def _distance(name: str) -> Iterator[Case]:
    profile = modelled(name)
    for sessions in (1, 16):
        for rtt in ROUND_TRIPS:
            for arm in (ArmKind.AUTO, ArmKind.SEQUENTIAL, ArmKind.OFF):
                topology = replace(_topology(arm, sessions), rtt=rtt)
                yield Case("distance", arm.value, profile, topology, _load(sessions, 128))


def _fan_out(name: str) -> Iterator[Case]:
    profile = modelled(name)
    for each in (1, 8, 32):
        yield Case("fan-out", f"{each}, no draft", profile, _topology(ArmKind.OFF, each), _load(each, 128))
        for replicas in FAN_OUT:
            sessions = each * replicas
            topology = _topology(ArmKind.AUTO, sessions, verify=replicas)
            yield Case("fan-out", str(each), profile, topology, _load(sessions, 128 if sessions < 64 else 64))


def _host(name: str) -> Iterator[Case]:
    whole = modelled(name)
    for factor in HOST_FACTORS:
        times = {field: value * factor for field, value in whole.host.model_dump().items()}
        profile = whole.model_copy(update={"host": type(whole.host)(**times)})
        for sessions in (16, 256):
            for arm in (ArmKind.OFF, ArmKind.AUTO):
                yield Case("host", f"{factor:g}", profile, _topology(arm, sessions), _load(sessions))


def _topology(arm: ArmKind, sessions: int, verify: int = 1) -> Topology:
    orchestrators = -(-sessions // SESSIONS_PER_ORCHESTRATOR)
    return Topology(arm=arm, verify_replicas=verify, orchestrators=orchestrators, max_sessions=sessions)


def _load(sessions: int, new_tokens: int = 0) -> Load:
    """Few sessions send several requests, so that figures come from many texts. Many have short texts."""
    few = sessions <= 64
    return Load(
        sessions=sessions,
        rounds=max(1, 12 // sessions),
        prompt_tokens=32 if few else 8,
        new_tokens=new_tokens or (128 if few else 64),
        temperature=TEMPERATURE,
    )
