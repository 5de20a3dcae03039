"""Computes how many draft replicas the sessions need. Pure: observations and the time are arguments.

    demand    sessions that want drafts, as a mean over about `MEAN_SECONDS`. By Little's law it is the rate
              of arrivals times their stay, whatever the distributions: nothing else is needed of the traffic
    capacity  sessions that one replica serves well
    replicas  demand / capacity, not rounded

A draft engine always finds something to expand, so its utilization cannot be the signal; the number of
sessions can. A replica is assumed to serve `UTILIZATION` of its slots well, until the pool is seen to be
short (docs/metrics.md). It is short when, at k sessions per replica, sessions lack drafts for a share m of
their time although there are free slots, or when drafts answer after a time `lag` that is longer than a
target step while the target idles. Then

    capacity = k * (1 - m)   or   k * step / lag

With the second, n replicas become n * lag / step. This is the rule of Kubernetes' autoscaler, desired =
ceil(current * metric / wanted metric), see
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details. The learned
capacity is kept, because otherwise the pool would shrink as soon as it had grown enough. While the pool is
not short, the capacity doubles in `FADE_SECONDS`: a fast decrease and a slow increase, as congestion control
finds a capacity that nobody reports to it (Chiu and Jain, 1989). A capacity is at least 1, and with at most
one session per replica the pool is not short: two replicas cannot draft for one session.

With several orchestrators, each sees its own sessions, and the replicas' answers to its probes say how many
sessions the others have open there. So each knows what the whole pool needs (`all_replicas`), for an
autoscaler that asks one of them, as KEDA does. It also knows the share of its own sessions in that
(`own_replicas`), for an autoscaler that adds up all reports, as that of Kubernetes does with an external
metric. Shares are fractions, so nothing is rounded here. The minimum, the maximum and how long a smaller
number must hold are left to the autoscaler: three orchestrators that each kept their own highest demand would
together keep more replicas than were ever needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.observing.draft_load import Totals
from orchestrator.replicas.pool import DraftCapacity

MEAN_SECONDS = 5.0
"""Approximate time over which demand is averaged: a third of the period at which Kubernetes asks."""
MIN_SESSIONS = 0.02
"""Demand below which there is none: such a mean is left over from sessions that ended a while ago."""
UTILIZATION = 0.8
"""Share of a replica's slots that is planned for. The rest serves while the next replica starts."""
SHORT_MISSING = 0.1
SHORT_IDLE = 0.2
"""Shares of the wanted time, without a draft and idle, above which the pool is short. See docs/metrics.md."""
JUDGE_SECONDS = 10.0
"""Shortest time over which the pool is judged to be short or not, with one number of replicas."""
JUDGE_WANTED_SECONDS = 2.0
"""Least wanted session time in such a judgement, in seconds."""
MIN_FACTOR = 0.5
"""Least factor by which one judgement changes the capacity: it at most halves it."""
FADE_SECONDS = 1800.0
"""Time in which a learned capacity doubles while the pool is not short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(DraftCapacity):
    """What an orchestrator sees: the draft pool, and how its own sessions want drafts."""

    wanted: int
    """Sessions of this orchestrator that want drafts."""
    totals: Totals
    """Sums over the sessions of this orchestrator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand for draft replicas; all numbers are finite and not negative."""

    own_replicas: float = 0.0
    """The share of `all_replicas` that this orchestrator's sessions need."""
    all_replicas: float = 0.0
    sessions: float = 0.0
    """Sessions that want drafts, with those of other orchestrators."""
    sessions_per_replica: float = 0.0
    """Sessions that one replica is assumed to serve well; 0 while no replica has been seen."""


class Scaler:
    """Turns observations into the demand for replicas.

    `sessions_per_replica` fixes the capacity; with 0 it is learned. `period` is the usual time between
    observations in seconds. After a pause much longer than this the orchestrator itself stood still, so
    drafts seemed to answer late: the judgement begins anew, once what had piled up was read.
    """

    def __init__(self, sessions_per_replica: int, period: float) -> None:
        self._fixed = sessions_per_replica
        self._longest_pause = max(2 * period, MEAN_SECONDS)
        self._own = _Mean()
        self._others = _Mean()
        self._slots = 0.0
        """Mean slots of a replica when replicas were last seen."""
        self._learned = math.inf
        self._now: float | None = None
        self._judged: tuple[float, int, Totals] | None = None
        """Time, replicas and sums at the last judgement, or when the number of replicas last changed."""

    def observe(self, seen: Observation, now: float) -> Demand:
        """The demand after one more observation; `now` may repeat, but must not go back."""
        elapsed = math.inf if self._now is None else max(now - self._now, 0.0)
        self._now = now
        own = self._own.add(seen.wanted, elapsed)
        others = self._others.add(seen.others, elapsed)
        if seen.replicas:
            self._slots = max(seen.slots / seen.replicas, 1.0)
        if self._longest_pause < elapsed < math.inf:
            self._judged = None
        else:
            self._judge(seen, now)
        return self._demand(own, others)

    def _demand(self, own: float, others: float) -> Demand:
        sessions, capacity = own + others, self._capacity()
        if sessions < MIN_SESSIONS:
            return Demand(sessions_per_replica=capacity)
        replicas = sessions / (capacity or max(sessions, 1.0))  # before any is seen, one is enough
        return Demand(
            own_replicas=replicas * own / sessions,
            all_replicas=replicas,
            sessions=sessions,
            sessions_per_replica=capacity,
        )

    def _capacity(self) -> float:
        if self._fixed:
            return min(self._fixed, self._slots or math.inf)
        return max(min(UTILIZATION * self._slots, self._learned), 1.0) if self._slots else 0.0

    def _judge(self, seen: Observation, now: float) -> None:
        if self._judged is None or self._judged[1] != seen.replicas or seen.replicas == 0:
            self._judged = (now, seen.replicas, seen.totals)
            return
        since, replicas, before = self._judged
        lately = seen.totals - before
        if now - since < JUDGE_SECONDS or lately.wanted_seconds < JUDGE_WANTED_SECONDS:
            return
        self._judged = (now, replicas, seen.totals)
        load = (self._own.value + self._others.value) / replicas
        factor = _factor(lately, has_room=load <= UTILIZATION * self._slots)
        if factor < 1.0 and load > 1.0:
            self._learned = max(min(self._learned, load * max(factor, MIN_FACTOR)), 1.0)
        else:
            self._learned *= 2.0 ** min((now - since) / FADE_SECONDS, 1.0)


def _factor(lately: Totals, *, has_room: bool) -> float:
    """The factor to multiply the load with so that the pool is not short; 1 or more: it is not short."""
    missing = lately.missing_seconds / lately.wanted_seconds
    factor = 1.0
    if missing > SHORT_MISSING and has_room:  # without room, the slots already ask for more
        factor = 1.0 - missing
    if lately.idle_seconds / lately.wanted_seconds > SHORT_IDLE and lately.lags and lately.steps:
        lag, step = lately.lag_seconds / lately.lags, lately.step_seconds / lately.steps
        factor = min(factor, step / lag if lag > step else 1.0)
    return factor


@dataclass(slots=True)
class _Mean:
    """A mean over about the last `MEAN_SECONDS`: values count by how long they held, older ones less."""

    value: float = 0.0

    def add(self, latest: int, elapsed: float) -> float:
        """Add the value that held for the last `elapsed` seconds; return the mean."""
        self.value += (latest - self.value) * -math.expm1(-elapsed / MEAN_SECONDS)
        return self.value
