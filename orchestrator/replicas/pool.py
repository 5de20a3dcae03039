"""Keeps track of the replicas of one kind: which can be used, and which one a session should use.

Pure: `orchestrator.replicas.fleet` probes replicas and reports what it sees, sessions report how their
streams ended, and time is passed in. A replica is usable when the last probe found it serving the right
vocabulary and its circuit breaker lets it be tried:

    closed      used freely; `failures` in a row open it
    open        kept out until `breaker_seconds` have passed
    half open   one session tries it; its outcome closes or opens the breaker
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.protocol.errors import (
    DeadlineExceeded,
    Draining,
    Flood,
    InvalidRequest,
    MismatchedPair,
    OutOfPages,
    OutriderError,
    Overloaded,
    StaleHandle,
    Unavailable,
)
from outrider.protocol.messages import ModelInfo
from outrider.recent import Recent

NO_FAULT = (DeadlineExceeded, InvalidRequest, StaleHandle)
"""Errors that say nothing about the replica: the request is wrong, or its caller does not read."""
PREFIX_TOKENS = 64
"""Number of first tokens of a prompt by which it is sent to the replica that may have its KV pages."""
MAX_PREFIXES = 4096
LOST_PROBES = 3
"""Probes in a row without an answer after which running sessions are moved."""
MIN_BUSY_SECONDS = 0.05
"""Shortest time before a replica that refused a session for lack of room is asked again."""
AFFINITY_SLACK = 2
"""Number of sessions by which a replica with the prompt's pages may exceed the least loaded one."""


class ReplicaState(StrEnum):
    """What a replica can be used for, and if not, why."""

    USABLE = "usable"
    UNKNOWN = "unknown"
    """Not probed yet."""
    DOWN = "down"
    DRAINING = "draining"
    MISMATCHED = "mismatched"
    BROKEN = "broken"
    """Its circuit breaker is open."""
    SHADOW = "shadow"
    """A draft whose proposals are compared with the target's text, not verified."""


@dataclass(slots=True, eq=False)
class Replica:
    """The state of one replica, as seen by probes and sessions."""

    endpoint: str
    info: ModelInfo | None = None
    serving: bool = False
    reachable: bool = False
    missed_probes: int = 0
    """Probes in a row without an answer."""
    mismatch: str = ""
    """Why it cannot be paired with the target; empty when it can."""
    failures: int = 0
    """Sessions in a row that failed on it."""
    open_until: float = 0.0
    """Time until which its circuit breaker is open."""
    trial: Reservation | None = None
    """The session that tries the replica while its breaker is half open."""
    busy_until: float = 0.0
    """Time until which it gets no session because it refused one for lack of room."""
    reservations: set[Reservation] = field(default_factory=set)
    """The sessions of this orchestrator that use it."""
    reservations_at_probe: int = 0
    """Number of `reservations` at the last probe."""

    @property
    def load(self) -> float:
        """Sessions in use as a share of its maximum.

        These are the sessions of all callers at the last probe, corrected by those of this orchestrator that
        have begun or ended since.
        """
        if self.info is None:
            return len(self.reservations)
        sessions = self.info.sessions + len(self.reservations) - self.reservations_at_probe
        return max(sessions, len(self.reservations)) / max(1, self.info.max_sessions)

    @property
    def room(self) -> int:
        """Number of sessions of this orchestrator that it has room for.

        If other orchestrators use it too, one more session may be opened. It waits at the replica and gets a
        place when one of their sessions ends.
        """
        if self.info is None:
            return 0
        others = max(0, self.info.sessions - self.reservations_at_probe)
        admitted = sum(reservation.incarnation != "" for reservation in self.reservations)
        return max(self.info.max_sessions - others, admitted) + (others > 0)


@dataclass(slots=True, eq=False)
class Reservation:
    """One session's use of a replica. `on_lost` is called when a probe finds the replica gone."""

    replica: Replica
    on_lost: Callable[[OutriderError], None]
    incarnation: str = ""
    """Incarnation of the process that admitted the session; empty until it is admitted."""
    replaced: bool = False
    """True once another process answers probes in place of that one."""


@dataclass(frozen=True, slots=True)
class DraftCapacity:
    """The capacity of the draft pool."""

    replicas: int
    """Draft replicas that can be used."""
    slots: int
    """Sessions that they have room for."""
    others: int
    """Sessions that other orchestrators have open at draft replicas."""


class Replicas:
    """The replicas of one kind."""

    def __init__(self, breaker_failures: int, breaker_seconds: float) -> None:
        self._breaker_failures = breaker_failures
        self._breaker_seconds = breaker_seconds
        self._replicas: dict[str, Replica] = {}
        self._prefixes = Recent[int, str](MAX_PREFIXES)
        """Endpoint that saw a prompt last, by the hash of the prompt's first tokens."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def find(self, endpoint: str) -> Replica | None:
        """The replica at an endpoint, if it is known."""
        return self._replicas.get(endpoint)

    def state(self, replica: Replica, now: float) -> ReplicaState:
        """What the replica can be used for now."""
        if replica.info is None and replica.missed_probes == 0:
            return ReplicaState.UNKNOWN
        if not replica.reachable:
            return ReplicaState.DOWN
        if replica.mismatch:
            return ReplicaState.MISMATCHED
        if not replica.serving:
            return ReplicaState.DRAINING
        if replica.info is not None and replica.info.shadow:
            return ReplicaState.SHADOW
        return ReplicaState.BROKEN if self._breaker_is_open(replica, now) else ReplicaState.USABLE

    def count(self, state: ReplicaState, now: float) -> int:
        """Replicas in a state."""
        return sum(self.state(replica, now) is state for replica in self)

    def usable(self, now: float) -> list[Replica]:
        """Replicas that a session may open now."""
        return [replica for replica in self if self.state(replica, now) is ReplicaState.USABLE]

    def set_endpoints(self, endpoints: Collection[str]) -> list[Replica]:
        """Add new endpoints and remove missing ones; returns the removed replicas. Their sessions go on."""
        gone = [replica for endpoint, replica in self._replicas.items() if endpoint not in endpoints]
        for replica in gone:
            del self._replicas[replica.endpoint]
        for endpoint in endpoints:
            self._replicas.setdefault(endpoint, Replica(endpoint))
        return gone

    def restore(self, replica: Replica) -> None:
        """Take back a removed replica with its sessions; it is down until it has been probed."""
        replica.reachable = False
        self._replicas[replica.endpoint] = replica

    def seen(self, endpoint: str, info: ModelInfo, serving: bool, mismatch: str = "") -> None:
        """A probe was answered. A new incarnation has no failures yet; sessions of the old one are lost."""
        replica = self._replicas.get(endpoint)
        if replica is None:
            return
        restarted = replica.info is not None and replica.info.incarnation != info.incarnation
        replica.info, replica.serving, replica.reachable = info, serving, True
        replica.missed_probes = 0
        replica.reservations_at_probe = len(replica.reservations)
        replica.mismatch = mismatch or self._listed_twice(replica, info)
        if restarted:
            replica.failures, replica.open_until, replica.trial = 0, 0.0, None
            current = ("", info.incarnation)
            old = [each for each in replica.reservations if each.incarnation not in current]
            for reservation in old:
                reservation.replaced = True
            _lose(old, Unavailable(f"{endpoint} was restarted"))

    def refused(self, endpoint: str) -> None:
        """A replica answered a probe but loads or drains: it gets no new sessions, and its sessions go on."""
        replica = self._replicas.get(endpoint)
        if replica is None or replica.info is None:
            self.missed(endpoint, Unavailable(f"{endpoint} is not serving"))
            return
        replica.serving, replica.reachable, replica.missed_probes = False, True, 0

    def missed(self, endpoint: str, error: OutriderError) -> None:
        """A probe failed: no new sessions, and after `LOST_PROBES` failures in a row its sessions leave.

        To them the replica is gone, whatever the probe's error is.
        """
        replica = self._replicas.get(endpoint)
        if replica is None:
            return
        replica.reachable = False
        replica.missed_probes += 1
        if replica.missed_probes == LOST_PROBES:
            _lose(list(replica.reservations), Unavailable(f"{endpoint} does not answer: {error}"))

    def reserve(
        self,
        now: float,
        on_lost: Callable[[OutriderError], None],
        *,
        tokens: Sequence[int] = (),
        avoid: str = "",
        prefer: str = "",
        beside: Collection[str] = (),
    ) -> Reservation | None:
        """Reserve the best usable replica for a session that begins with `tokens`.

        Args:
            prefer: Endpoint of the replica to use if it can be used.
            avoid: Endpoint of a replica to use only if no other can be used.
            beside: Endpoints of replicas that the session has already. It gets another one, if possible with
                another model.

        Returns:
            None when no replica can be used, or none has room.
        """
        candidates = [replica for replica in self.usable(now) if replica.busy_until <= now]
        if beside:
            candidates = self._beside(candidates, beside)
        others = [replica for replica in candidates if replica.endpoint != avoid]
        candidates = others or candidates
        if not candidates:
            return None
        prefix = hash(tuple(tokens[:PREFIX_TOKENS]))
        replica = self._pick(candidates, prefix, prefer)
        self._prefixes[prefix] = replica.endpoint
        reservation = Reservation(replica, on_lost)
        if replica.failures >= self._breaker_failures:
            replica.trial = reservation
        replica.reservations.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """The session is over: its place is free. May be called twice."""
        reservation.replica.reservations.discard(reservation)
        if reservation.replica.trial is reservation:
            reservation.replica.trial = None

    def succeeded(self, reservation: Reservation) -> None:
        """The session got what it needs from the replica: close the replica's breaker."""
        reservation.replica.failures = 0
        reservation.replica.open_until = 0.0

    def failed(self, reservation: Reservation, error: OutriderError, now: float) -> None:
        """The session lost the replica. Errors that are not the replica's fault do not count against it."""
        replica = reservation.replica
        if isinstance(error, Overloaded):
            full = not isinstance(error, OutOfPages)  # pages may be too few only for this session
            replica.busy_until = now + max(error.retry_after or 0.0, MIN_BUSY_SECONDS) if full else 0.0
            return
        if reservation.replaced:
            return  # the process that lost it is gone
        if isinstance(error, MismatchedPair):
            replica.mismatch = str(error)  # until the next probe
        if isinstance(error, Draining):
            replica.serving = False  # until the next probe
        if isinstance(error, (Draining, *NO_FAULT)):
            return
        if isinstance(error, Unavailable):
            replica.reachable = False  # until the next probe
        replica.failures += 1
        if isinstance(error, Flood):  # one flood is enough
            replica.failures = max(replica.failures, self._breaker_failures)
        if replica.failures >= self._breaker_failures:
            replica.open_until = now + self._breaker_seconds

    def move(self, replica: Replica, now: float, max_sessions: int) -> None:
        """Make up to `max_sessions` sessions leave a replica that drains or is a shadow, if they can.

        Another replica must be usable, and for verify sessions it must take their keys and values.
        """
        if any(other is not replica and _layout(other) == _layout(replica) for other in self.usable(now)):
            draining = Draining(f"{replica.endpoint} takes no sessions any more; its own migrate")
            _lose(list(replica.reservations)[:max_sessions], draining)

    def next_change(self, now: float) -> float | None:
        """The time at which a replica may next become usable or have room without an event; None: never."""
        reachable = [replica for replica in self if replica.reachable]
        times = [time for replica in reachable for time in (replica.open_until, replica.busy_until)]
        return min((time for time in times if time > now), default=None)

    def _listed_twice(self, replica: Replica, info: ModelInfo) -> str:
        """Why a process that is used at another endpoint is not used here too; empty: it is not.

        DNS lists a pod that has an IPv4 and an IPv6 address twice.
        """
        for other in self:
            if other is replica or other.info is None or other.mismatch or not other.reachable:
                continue
            if info.incarnation and other.info.incarnation == info.incarnation:
                return f"its process is used at {other.endpoint} already"
        return ""

    def _breaker_is_open(self, replica: Replica, now: float) -> bool:
        tripped = replica.failures >= self._breaker_failures
        return tripped and (now < replica.open_until or replica.trial is not None)

    def _pick(self, candidates: Sequence[Replica], prefix: int, prefer: str) -> Replica:
        with_room = [replica for replica in candidates if replica.load < 1.0] or candidates
        for replica in with_room:
            if replica.endpoint == prefer:
                return replica
        best = min(with_room, key=lambda replica: (replica.load, len(replica.reservations), replica.endpoint))
        for replica in with_room:
            known = self._prefixes.get(prefix) == replica.endpoint
            if known and len(replica.reservations) <= len(best.reservations) + AFFINITY_SLACK:
                return replica
        return best

    def _beside(self, candidates: Sequence[Replica], beside: Collection[str]) -> list[Replica]:
        """Candidates other than the replicas at `beside`; only those with other models, if there are any."""
        models = {_model(replica) for replica in self if replica.endpoint in beside}
        others = [replica for replica in candidates if replica.endpoint not in beside]
        return [replica for replica in others if _model(replica) not in models] or others


def _model(replica: Replica) -> tuple[str, str]:
    return ("", "") if replica.info is None else (replica.info.kind, replica.info.model)


def _layout(replica: Replica) -> str:
    return "" if replica.info is None else replica.info.kv_layout


def _lose(reservations: Sequence[Reservation], error: OutriderError) -> None:
    for reservation in reservations:
        reservation.on_lost(error)
