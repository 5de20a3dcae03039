"""How many draft replicas the sessions need. Pure: what is seen and the time are arguments.

    demand    sessions that want drafts, a mean over about `MEAN_SECONDS`: by Little's law arrivals times the
              time they stay, whatever their distributions, so nothing else has to be known of the traffic
    capacity  sessions that one replica serves well
    replicas  demand / capacity, not rounded

A draft engine always finds something to expand, so its utilization cannot be the signal; sessions can. A
replica is taken to serve `UTILIZATION` of its slots, until it is seen to be short (docs/metrics.md): at k
sessions a replica, sessions lack drafts for a share m of their time though there are slots, or drafts answer
after a time `lag` longer than a target step while the target idles. Then

    capacity = k * (1 - m)   or   k * step / lag

which makes the number of replicas n * lag / step: the rule of Kubernetes' autoscaler, desired = ceil(current
* metric / wanted metric), see
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details. What was learned
so is kept, or the pool would shrink as soon as it had helped; it fades while nothing is short, doubling in
`FADE_SECONDS`: multiplicative decrease and slow increase, as congestion control finds a capacity that nobody
tells it (Chiu and Jain, 1989). A capacity is at least 1: two replicas cannot draft for one session.

Several orchestrators. Each sees its own sessions, and in the replicas' answers to its probes how many
sessions the others have open there. So each knows what the whole pool needs (`all_replicas`), for an
autoscaler that asks one of them, as KEDA does; and its share of it by its sessions (`own_replicas`), for one
that adds up what all report, as the autoscaler of Kubernetes does with an external metric. The fractions are
why nothing is rounded here. Minimum, maximum and the time that a smaller number must hold are the
autoscaler's: three orchestrators that each kept their highest would together keep more than there ever was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.observing.draft_load import Totals
from orchestrator.replicas.pool import DraftCapacity

MEAN_SECONDS = 5.0
"""About the time over which demand is a mean: a third of the period at which Kubernetes asks."""
MIN_SESSIONS = 0.02
"""Less demand than this is none: the mean of sessions that ended a while ago."""
UTILIZATION = 0.8
"""Share of a replica's slots that is planned for; the rest is for the next replica's start."""
SHORT_MISSING = 0.1
SHORT_IDLE = 0.2
"""Shares of the wanted time above which the pool is short; docs/metrics.md has the same."""
JUDGE_SECONDS = 10.0
"""A judgement of whether the pool is short looks at this long, with one number of replicas."""
JUDGE_WANTED_SECONDS = 2.0
"""... and at no less session time."""
MIN_FACTOR = 0.5
"""A judgement at most halves the capacity."""
FADE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(DraftCapacity):
    """What an orchestrator sees: the draft pool, and what its own sessions want of it."""

    wanted: int
    """Own sessions that want drafts."""
    totals: Totals
    """Sums over the own sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is needed; finite numbers, none negative."""

    own_replicas: float = 0.0
    """This orchestrator's share of all."""
    all_replicas: float = 0.0
    sessions: float = 0.0
    """Sessions that want drafts, those of others included."""
    sessions_per_replica: float = 0.0
    """What one replica is taken to serve well; 0 while none has been seen."""


class Scaler:
    """Turns observations into the demand for replicas.

    `sessions_per_replica` fixes the capacity; 0 has it learned.
    """

    def __init__(self, sessions_per_replica: int = 0) -> None:
        self._fixed = sessions_per_replica
        self._own = _Mean()
        self._others = _Mean()
        self._slots = 0.0
        """Slots of one replica, when one was last seen."""
        self._learned = math.inf
        self._now: float | None = None
        self._judged: tuple[float, int, Totals] | None = None
        """Time, replicas and sums at the last judgement, or when the number of replicas last changed."""

    def observe(self, seen: Observation, now: float) -> Demand:
        """The demand after one more observation; times may stand still, but not run backwards."""
        elapsed = math.inf if self._now is None else max(now - self._now, 0.0)
        self._now = now
        own = self._own.add(seen.wanted, elapsed)
        others = self._others.add(seen.others, elapsed)
        if seen.replicas:
            self._slots = max(seen.slots / seen.replicas, 1.0)
        self._judge(seen, now)
        return self._demand(own, others)

    def _demand(self, own: float, others: float) -> Demand:
        sessions, capacity = own + others, self._capacity()
        if sessions < MIN_SESSIONS:
            return Demand(sessions_per_replica=capacity)
        replicas = sessions / (capacity or max(sessions, 1.0))  # nothing known of replicas: one will tell
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
        if factor < 1.0:
            self._learned = max(min(self._learned, load * max(factor, MIN_FACTOR)), 1.0)
        else:
            self._learned *= 2.0 ** min((now - since) / FADE_SECONDS, 1.0)


def _factor(lately: Totals, *, has_room: bool) -> float:
    """What the load would have to be multiplied with for the pool not to be short; 1 or more: it is not."""
    missing = lately.missing_seconds / lately.wanted_seconds
    factor = 1.0
    if missing > SHORT_MISSING and has_room:  # without room, the slots already say it
        factor = 1.0 - missing
    if lately.idle_seconds / lately.wanted_seconds > SHORT_IDLE and lately.lags and lately.steps:
        lag, step = lately.lag_seconds / lately.lags, lately.step_seconds / lately.steps
        factor = min(factor, step / lag if lag > step else 1.0)
    return factor


@dataclass(slots=True)
class _Mean:
    """A mean over about the last `MEAN_SECONDS`: each value counts as long as it held, older ones less."""

    value: float = 0.0

    def add(self, latest: int, elapsed: float) -> float:
        """`latest` is the value now, and stands for the time since the one before."""
        self.value += (latest - self.value) * -math.expm1(-elapsed / MEAN_SECONDS)
        return self.value
