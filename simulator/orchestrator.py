"""The orchestrator on the virtual clock, with its real session state machine and its real choice of replicas.

Links take the place of asyncio in `orchestrator.pipeline`: carry out each action, hand each event to the
session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draft_service import mailbox as draft_mailbox
from orchestrator.events import (
    Action,
    Announce,
    BlockArrived,
    ConnectDraft,
    ConnectVerify,
    DraftFailed,
    DraftOpened,
    DropDraft,
    Emit,
    Event,
    Finish,
    ParkDraft,
    SendBlock,
    SendVerdict,
    VerdictArrived,
    VerifyOpened,
)
from orchestrator.replicas.pool import Replicas, Reservation
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.session import Session, SessionLimits
from outrider.protocol.errors import NoReplica
from outrider.protocol.messages import ModelInfo, OpenDraft, Opened, OpenVerify, TokenBlock, Verdict
from outrider.rpc.queues import Stream
from simulator.network import Host, Link
from simulator.replica import SimulatedReplica
from simulator.timeline import Timeline
from verify_service import mailbox as verify_mailbox

PATIENT = SessionLimits(recovery_seconds=1e9, stall_seconds=1e9)
"""Limits that never apply, because simulated replicas do not fail."""


@dataclass(slots=True)
class SimulatedFleet:
    """The replicas by endpoint, and the time that messages travel to them."""

    verify: Mapping[str, SimulatedReplica]
    draft: Mapping[str, SimulatedReplica]
    served: ModelInfo
    delay: float
    """Seconds that one message travels between the services."""
    pools: dict[str, Replicas] = field(init=False)

    def __post_init__(self) -> None:
        self.pools = {"verify": self._pool(self.verify), "draft": self._pool(self.draft)}

    def _pool(self, endpoints: Mapping[str, object]) -> Replicas:
        pool = Replicas(breaker_failures=3, breaker_seconds=5.0)
        pool.set_endpoints(list(endpoints))
        for endpoint in endpoints:
            pool.seen(endpoint, self.served, serving=True)
        return pool


@dataclass(slots=True)
class SimulatedGeneration:
    """One request from its arrival to its last token; `on_verdict` takes the verdicts for the client."""

    request: ResolvedRequest
    fleet: SimulatedFleet
    timeline: Timeline
    host: Host
    on_verdict: Callable[[Verdict], None]
    session: Session = field(init=False)
    _reservations: dict[str, Reservation] = field(default_factory=dict)
    """Reservations by kind of replica."""
    _to_verify: _VerifyLink | None = None
    _to_draft: _DraftLink | None = None

    def __post_init__(self) -> None:
        self.session = Session(self.request, self.request.seed_of(0), PATIENT)

    def start(self) -> None:
        """Open the streams."""
        self._carry_out(self.session.start(self.timeline.now))

    def handle(self, event: Event) -> None:
        """Handle an event that has reached the orchestrator."""
        self._carry_out(self.session.handle_event(event, self.timeline.now))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ConnectVerify(stream, opening):
                    self._connect_verify(stream, opening)
                case ConnectDraft(stream, opening):
                    self._connect_draft(stream, opening)
                case SendBlock(block):
                    assert self._to_verify is not None
                    self._to_verify.propose(block)
                case SendVerdict(verdict):
                    assert self._to_draft is not None
                    self._to_draft.verdict(verdict)
                case Emit(verdict):
                    self.host.loop.do(self.host.send_seconds, partial(self.on_verdict, verdict))
                case ParkDraft():
                    self._park_draft()
                case Announce() | DropDraft():
                    pass  # clients know their seeds; no draft fails
                case Finish():
                    self._finish()
                case _:
                    raise AssertionError(f"{action} in a simulation without failures")

    def _connect_verify(self, stream: int, opening: OpenVerify) -> None:
        reservation = self._reserve("verify", opening.token_ids)
        replica = self.fleet.verify[reservation.replica.endpoint]
        self._to_verify = _VerifyLink(self, stream, replica)
        self._to_verify.open(opening)

    def _connect_draft(self, stream: int, opening: OpenDraft) -> None:
        if not self.fleet.draft:
            self.handle(DraftFailed(stream, NoReplica("no draft replica can be used"), ""))
            return
        reservation = self._reserve("draft", opening.token_ids)
        replica = self.fleet.draft[reservation.replica.endpoint]
        self._to_draft = _DraftLink(self, stream, replica)
        self._to_draft.open(opening)

    def _park_draft(self) -> None:
        assert self._to_draft is not None
        self._to_draft.close()
        self._to_draft = None
        self._release("draft")

    def _reserve(self, kind: str, tokens: tuple[int, ...]) -> Reservation:
        pool = self.fleet.pools[kind]
        reservation = pool.reserve(self.timeline.now, lambda error: None, tokens=tokens)
        assert reservation is not None, "simulated replicas are always usable"
        self._reservations[kind] = reservation
        return reservation

    def _release(self, kind: str) -> None:
        self.fleet.pools[kind].release(self._reservations.pop(kind))

    def _finish(self) -> None:
        for link in (self._to_verify, self._to_draft):
            if link is not None:
                link.close()
        for kind in list(self._reservations):
            self._release(kind)


class _ReplicaLink:
    """One session's stream to a replica: both directions."""

    def __init__(self, generation: SimulatedGeneration, number: int, replica: SimulatedReplica) -> None:
        timeline, delay = generation.timeline, generation.fleet.delay
        self._timeline = timeline
        self._generation = generation
        self._number = number
        self._replica = replica
        self._there = Link(timeline, generation.host, replica.host, delay)
        self._here = Link(timeline, replica.host, generation.host, delay)
        self._opened: Stream[Any] | None = None

    @property
    def _stream(self) -> Stream[Any]:
        """The stream at the replica, where messages arrive in order."""
        if self._opened is None:
            self._opened = self._replica.stream(self._receive)
        return self._opened

    def _send(self, message: Callable[[Stream[Any]], object]) -> None:
        """Send a message; the replica's event loop makes it from the stream and puts it into the inbox."""
        self._there.send(lambda: self._replica.post(message(self._stream)))

    def _receive(self, event: object) -> None:
        """Pass on an event of the replica if the session needs it."""
        passed: Event
        match event:
            case Opened():
                passed = VerifyOpened(self._number, event, self._replica.name)
            case Verdict():
                passed = VerdictArrived(self._number, event)
            case draft_mailbox.Admitted(cached):
                passed = DraftOpened(self._number, Opened(self._replica.name, "", cached), self._replica.name)
            case TokenBlock():
                passed = BlockArrived(self._number, event)
            case BaseException():
                raise event
            case _:
                return
        self._here.send(lambda: self._generation.handle(passed))


class _VerifyLink(_ReplicaLink):
    """One session's stream to a verify replica."""

    def open(self, opening: OpenVerify) -> None:
        self._send(lambda stream: verify_mailbox.Open(stream, opening))

    def propose(self, block: TokenBlock) -> None:
        self._there.send(lambda: self._offer(block))

    def close(self) -> None:
        self._send(verify_mailbox.Close)

    def _offer(self, block: TokenBlock) -> None:
        if self._stream.pending < verify_mailbox.MAX_PENDING_BLOCKS:
            self._stream.sent += 1
            self._replica.post(verify_mailbox.Propose(self._stream, block, self._timeline.now))


class _DraftLink(_ReplicaLink):
    """One session's stream to a draft replica."""

    def open(self, opening: OpenDraft) -> None:
        self._send(lambda stream: draft_mailbox.Open(stream, opening))

    def verdict(self, verdict: Verdict) -> None:
        self._send(lambda stream: draft_mailbox.Commit(stream, verdict, self._timeline.now))

    def close(self) -> None:
        self._send(draft_mailbox.Close)
