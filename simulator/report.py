"""The results of a run: throughput, latency, acceptance, and the use of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from simulator.clients import ServedRequest
from simulator.devices import StepTotals
from simulator.profile import Profile
from simulator.topology import Load, Topology


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: the requests that clients got answered, and the work of each engine."""

    profile: Profile
    topology: Topology
    load: Load
    served: Sequence[ServedRequest]
    targets: Sequence[StepTotals]
    drafts: Sequence[StepTotals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one run; times in seconds."""

    profile: str
    arm: str
    temperature: float
    sessions: int
    verify_replicas: int
    draft_replicas: int
    devices: int
    rtt: float
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    first_token_p50: float
    first_token_p99: float
    per_token_p50: float
    """Median of the requests' mean times per token."""
    per_token_p99: float
    acceptance_length: float
    verified_per_round: float
    """Mean nodes of one session in a target step."""
    hit_rate: float
    draft_wanted: float
    """Share of the rounds after which the session should have a draft. Below 0.5, drafts mostly rest."""
    efficiency: float
    """Target step over the mean period of a session's rounds; 1: only the target's step takes time."""
    step_tokens: float
    step_sessions: float
    step_seconds: float
    target_busy: float
    """Share of the time in which a target forward ran; mean over replicas."""
    draft_busy: float


def summarise(run: Run) -> Report:
    """The figures of a run.

    Raises:
        AssertionError: a client got tokens that are not the target's, which is a bug.
    """
    for served in run.served:
        assert tuple(served.tokens) == served.expected, "the tokens are not the target's"
    seconds = max(s.ended for s in run.served) - min(s.asked for s in run.served)
    tokens = sum(len(s.tokens) for s in run.served)
    rounds = sum(s.statistics.steps for s in run.served)
    devices = run.topology.devices(run.profile.target_devices)
    target, draft = total(run.targets), total(run.drafts)
    firsts, pers = [s.first_token for s in run.served], [s.per_token for s in run.served]
    return Report(
        profile=run.profile.name,
        arm=run.topology.arm.value,
        temperature=run.load.temperature,
        sessions=run.load.sessions,
        verify_replicas=run.topology.verify_replicas,
        draft_replicas=run.topology.drafts,
        devices=devices,
        rtt=run.topology.rtt,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_device=tokens / seconds / devices,
        first_token_p50=percentile(firsts, 50),
        first_token_p99=percentile(firsts, 99),
        per_token_p50=percentile(pers, 50),
        per_token_p99=percentile(pers, 99),
        acceptance_length=sum(s.statistics.committed for s in run.served) / rounds,
        verified_per_round=sum(s.statistics.verified for s in run.served) / rounds,
        hit_rate=sum(s.statistics.hits for s in run.served) / rounds,
        draft_wanted=draft_wanted(run.served),
        efficiency=efficiency(run.served),
        step_tokens=target.tokens / target.steps,
        step_sessions=target.sessions / target.steps,
        step_seconds=target.seconds / target.steps,
        target_busy=target.seconds / seconds / len(run.targets),
        draft_busy=draft.seconds / seconds / max(len(run.drafts), 1),
    )


def total(parts: Sequence[StepTotals]) -> StepTotals:
    """The sum over engines."""
    return StepTotals(
        sum(part.steps for part in parts),
        sum(part.tokens for part in parts),
        sum(part.sessions for part in parts),
        sum(part.seconds for part in parts),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` % of the values do not exceed."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def draft_wanted(served: Sequence[ServedRequest]) -> float:
    """Share of the rounds after which the session should have a draft."""
    wanted = [arrival.draft_wanted for one in served for arrival in one.arrivals]
    return sum(wanted) / len(wanted)


def efficiency(served: Sequence[ServedRequest]) -> float:
    """Mean target step over the mean period of rounds, without first rounds."""
    steps = sum(arrival.forward for one in served for arrival in one.arrivals[1:])
    return steps / max(sum(one.decoding for one in served), 1e-9)


HEADER = (
    f"{'T':>4}{'RTT ms':>7}{'sess.':>6} {'arm':11}{'verify':>6}{'draft':>6}{'tok/s':>9}{'/device':>9}"
    f"{'TTFT ms':>9}{'p99':>7}{'ms/tok':>8}{'p99':>7}{'length':>7}{'nodes':>7}{'hits':>6}{'effic.':>7}"
    f"{'n/step':>8}{'sess/step':>10}{'step ms':>8}{'target':>7}{'draft':>6}"
)


def line(r: Report) -> str:
    """One line of the table."""
    return (
        f"{r.temperature:4}{r.rtt * 1e3:7.0f}{r.sessions:6} {r.arm:11}{r.verify_replicas:6}"
        f"{r.draft_replicas:6}{r.tokens_per_second:9.1f}{r.tokens_per_second_per_device:9.1f}"
        f"{r.first_token_p50 * 1e3:9.1f}{r.first_token_p99 * 1e3:7.0f}"
        f"{r.per_token_p50 * 1e3:8.2f}{r.per_token_p99 * 1e3:7.1f}"
        f"{r.acceptance_length:7.2f}{r.verified_per_round:7.2f}{r.hit_rate:6.0%}{r.efficiency:7.0%}"
        f"{r.step_tokens:8.1f}{r.step_sessions:10.1f}{r.step_seconds * 1e3:8.1f}"
        f"{r.target_busy:7.0%}{r.draft_busy:6.0%}"
    )
