"""The replicas of both kinds as a running process sees them: endpoints come and go, each is probed for as
long as it is known, sessions lease them and wait for them.

What is served is what the first verify replica said; a verify replica with another model is kept out until
none with the old one is left. Drafts are compared with it at every probe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from orchestrator.replicas.discovery import Discovery
from orchestrator.replicas.pool import Lease, Replica, Replicas, State
from orchestrator.replicas.probe import fetch_tokenizer, probe
from orchestrator.text.tokenizer import TextTokenizer
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import NoReplica, OutriderError
from outrider.protocol.messages import ModelInfo
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import client_certificates
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
RESPONSE_BYTES = {
    "grpc.health.v1.Health": 4 << 10,
    "outrider.internal.v1.DraftService": 64 << 10,
    "outrider.internal.v1.VerifyService": 64 << 10,
    "outrider.internal.v1.VerifyService/Verify": 1 << 20,
    "outrider.internal.v1.VerifyService/GetTokenizer": 64 << 20,
}
"""Largest messages of replicas. A block of 1,024 nodes has 19 KiB, a verdict 300 bytes for each token with 20
alternatives, a tokenizer tens of MiB; `max_message_mb` bounds it too."""
MOVES = 8
"""Sessions that leave a draining draft replica at once: each costs its new replica a prefill."""
DOWN_PROBE_SECONDS = 0.25
"""Period of probes of a replica that cannot be used, and of the search for the first one that can verify: it
may be there at any moment."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are checked against."""

    info: ModelInfo
    tokenizer: TextTokenizer | None


@dataclass(frozen=True, slots=True)
class DraftCapacity:
    """What the draft pool has room for."""

    replicas: int
    """That can be used."""
    slots: int
    """Sessions that they have room for."""
    others: int
    """Sessions that other orchestrators have open."""


@dataclass(slots=True)
class _Known:
    """A replica that is probed."""

    kind: str
    channel: grpc.aio.Channel
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to probe it now."""
    task: asyncio.Task[None] | None = None
    warned: str = ""
    """The last complaint about it, so that each is logged once."""
    silent: bool = False
    """It did not answer the last probe."""
    arithmetic: str = ""
    """That it was last compared with."""


class Fleet:
    """All replicas; `run` keeps it up to date."""

    def __init__(
        self,
        config: OrchestratorConfig,
        instruments: OrchestratorInstruments,
        on_serving: Callable[[bool], None] = lambda serving: None,
        on_round: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.served: ServedModel | None = None
        self.certificates = client_certificates(
            config.tls_client_ca, config.tls_client_cert, config.tls_client_key
        )
        """What is shown to replicas, and what theirs are checked against; None: plaintext."""
        self.pools = {
            kind: Replicas(config.breaker_failures, config.breaker_seconds) for kind in ("verify", "draft")
        }
        self._config = config
        self._instruments = instruments
        self._on_serving = on_serving
        self._on_round = on_round
        """Called whenever endpoints were looked for: every `discovery_seconds` once something is served."""
        self._on_change = on_change
        """Called after every probe, and when a replica has admitted a session."""
        self._room = 0
        """Sessions of ours that verify replicas have room for; what it last was while none can be used."""
        self._serving = False
        self._clock = clock
        addresses = {"verify": config.verify, "draft": config.draft}
        self._discoveries = [
            Discovery.configure(kind, static, config.replicas_file) for kind, static in addresses.items()
        ]
        self._known: dict[tuple[str, str], _Known] = {}
        self._retired: list[tuple[str, Replica, grpc.aio.Channel]] = []
        """Channels of replicas that discovery no longer lists, while sessions still use them."""
        self._change = asyncio.Event()
        self._adopting = asyncio.Lock()

    async def run(self) -> None:
        """Discover and probe until cancelled."""
        try:
            async with asyncio.TaskGroup() as probes:
                while True:
                    for discovery in self._discoveries:
                        await self._take_up(discovery, await discovery.endpoints(), probes)
                    await self._close_retired()
                    self._report()
                    self._on_round()
                    await asyncio.sleep(self._period(self.served is not None))
        finally:
            await self._close_channels()

    async def ready(self) -> None:
        """Wait until a verify replica is known and every replica listed so far has been probed once, so that
        the first request already finds its draft."""
        while self.served is None or any(pool.count(State.UNKNOWN, 0.0) for pool in self.pools.values()):
            await self._change.wait()

    def misfits(self) -> list[str]:
        """Why drafts that answered cannot be used with the model that is served."""
        return [replica.mismatch for replica in self.pools["draft"] if replica.mismatch]

    def draft_capacity(self) -> DraftCapacity:
        """The draft pool as the last probes found it."""
        usable = self.pools["draft"].usable(self._clock())
        answered = [replica for replica in self.pools["draft"] if replica.info is not None]
        slots = sum(replica.info.max_sessions for replica in usable if replica.info is not None)
        others = sum(
            replica.info.sessions - replica.leases_at_probe
            for replica in answered
            if replica.info is not None and replica.reachable
        )
        return DraftCapacity(len(usable), slots, max(others, 0))

    def capacity(self) -> int:
        """How many continuations may run at once. While no verify replica can be used that is as many as
        before: they wait for a replica, and not longer than the recovery time."""
        if usable := self.pools["verify"].usable(self._clock()):
            self._room = sum(replica.room for replica in usable)
        return min(self._room, self._config.max_running or self._room)

    def admitted(self, lease: Lease, incarnation: str) -> None:
        """A replica, in this life of its, has admitted the session."""
        lease.incarnation = incarnation
        self._on_change()

    def channel(self, kind: str, lease: Lease) -> grpc.aio.Channel:
        """The channel to a leased replica."""
        known = self._known.get((kind, lease.replica.endpoint))
        if known is None:
            raise NoReplica(f"{lease.replica.endpoint} was taken out of service")
        return known.channel

    def lease_draft(
        self,
        tokens: Sequence[int],
        on_lost: Callable[[OutriderError], None],
        avoid: str,
        beside: Sequence[str] = (),
    ) -> Lease | None:
        """A draft replica beside those that the session has, or None when none can be used now."""
        return self.pools["draft"].lease(self._clock(), on_lost, tokens=tokens, avoid=avoid, beside=beside)

    async def lease_verify(
        self,
        tokens: Sequence[int],
        on_lost: Callable[[OutriderError], None],
        *,
        avoid: str,
        prefer: str,
        give_up_at: float,
    ) -> Lease:
        """A verify replica, waiting for one until `give_up_at`, or for as long as all are merely full.

        Raises:
            NoReplica: there was none in time.
        """
        pool = self.pools["verify"]
        while True:
            change = self._change
            now = self._clock()
            lease = pool.lease(now, on_lost, tokens=tokens, avoid=avoid, prefer=prefer)
            if lease is not None:
                return lease
            wake_at = pool.next_change(now) or give_up_at
            if pool.usable(now):  # all of them are full: none is lost
                give_up_at = max(give_up_at, now + self._config.recovery_seconds)
            elif now >= give_up_at:
                raise NoReplica("no verify replica can be used; all are down, draining or kept out")
            else:
                wake_at = min(give_up_at, wake_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(wake_at - now):
                    await change.wait()

    def failed(self, kind: str, lease: Lease, error: OutriderError) -> None:
        """A session lost a replica: hold it against it, and look at it at once."""
        self.pools[kind].failed(lease, error, self._clock())
        known = self._known.get((kind, lease.replica.endpoint))
        if known is not None:
            self._complain(known, lease.replica)
            known.poke.set()

    async def _take_up(
        self, discovery: Discovery, endpoints: Sequence[str], probes: asyncio.TaskGroup
    ) -> None:
        """Probe what is new, let go of what is gone."""
        kind = discovery.kind
        for replica in self.pools[kind].set_endpoints(endpoints):
            known = self._known.pop((kind, replica.endpoint))
            assert known.task is not None
            known.task.cancel()
            self._retired.append((kind, replica, known.channel))
            logger.info("replica gone", kind=kind, endpoint=replica.endpoint)
        for endpoint in endpoints:
            if (kind, endpoint) not in self._known:
                channel = self._open_channel(endpoint, discovery.tls_name(endpoint))
                known = self._known[kind, endpoint] = _Known(kind, channel)
                known.task = probes.create_task(self._watch(endpoint, known))

    async def _watch(self, endpoint: str, known: _Known) -> None:
        """Probe one replica for as long as it is known."""
        while True:
            usable = await self._look_at(endpoint, known)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period(usable)):
                    await known.poke.wait()
            known.poke.clear()

    def _period(self, well: bool) -> float:
        """Seconds until the next look; not long where what was found cannot be used."""
        period = self._config.discovery_seconds
        return period if well else min(period, DOWN_PROBE_SECONDS)

    async def _look_at(self, endpoint: str, known: _Known) -> bool:
        """One probe and what follows from it; whether the replica can be used."""
        pool = self.pools[known.kind]
        try:
            answer = await probe(known.kind, known.channel)
            if answer.info is None:
                pool.refused(endpoint)
            else:
                await self._take_in(endpoint, known, answer.info, answer.serving)
            known.silent = False
        except OutriderError as error:
            pool.missed(endpoint, error)
            if not known.silent:
                logger.warning(
                    "replica does not answer", kind=known.kind, endpoint=endpoint, error=str(error)
                )
            known.silent = True
        replica = pool.find(endpoint)
        if replica is None:
            return False
        self._complain(known, replica)
        self._changed()
        now = self._clock()
        state = pool.state(replica, now)
        if known.kind == "draft" and state is State.DRAINING:
            pool.move(replica, now, MOVES)
        return state is State.USABLE

    async def _take_in(self, endpoint: str, known: _Known, info: ModelInfo, serving: bool) -> None:
        """A replica has said what it serves; a verify replica's model is served from now on, if nothing is
        served or nobody has that any more."""
        if known.kind == "verify":
            async with self._adopting:
                if serving and not self._is_served(info):
                    await self._serve(info, known.channel)
        self.pools[known.kind].seen(endpoint, info, serving, self._mismatch(known.kind, info))
        if known.kind == "verify" and known.arithmetic != info.arithmetic:
            known.arithmetic = info.arithmetic
            self._compare_arithmetic(endpoint, info)

    def _compare_arithmetic(self, endpoint: str, info: ModelInfo) -> None:
        """Say that a verify replica of the same model rounds otherwise than the one it was compared with."""
        if self.served is None or not self._agrees(info) or info.arithmetic == self.served.info.arithmetic:
            return
        logger.warning(
            "verify replicas differ in arithmetic: a session that moves between them may continue otherwise "
            "where two tokens are nearly equally likely; use one kind of processor, or set cpu_backend",
            endpoint=endpoint,
            arithmetic=info.arithmetic,
            others=self.served.info.arithmetic,
        )

    def _is_served(self, info: ModelInfo) -> bool:
        """Whether this model is served, or another one still is."""
        if self.served is None:
            return False
        return self._agrees(info) or self._verify_replicas_left()

    async def _serve(self, info: ModelInfo, channel: grpc.aio.Channel) -> None:
        """From now on requests are for this model; every replica is judged by it."""
        self.served = ServedModel(info, await fetch_tokenizer(channel, info))
        logger.info("serving model", model=info.model, vocabulary_size=info.vocabulary_size)
        for kind, pool in self.pools.items():
            for replica in pool:
                if replica.info is not None:
                    replica.mismatch = self._mismatch(kind, replica.info)

    def _verify_replicas_left(self) -> bool:
        """Whether some verify replica answered its last probe with the model that is served."""
        return self.served is not None and any(
            replica.info is not None
            and replica.serving
            and replica.missed_probes == 0
            and self._agrees(replica.info)
            for replica in self.pools["verify"]
        )

    def _agrees(self, info: ModelInfo) -> bool:
        """Whether a verify replica has the model that is served."""
        assert self.served is not None
        served = self.served.info
        return (info.model, info.vocabulary_hash) == (served.model, served.vocabulary_hash)

    def _mismatch(self, kind: str, info: ModelInfo) -> str:
        """Why the replica cannot be used with the model that is served; empty when it can."""
        if self.served is None:
            return "" if kind == "draft" else "not serving yet"
        if kind == "verify":
            return "" if self._agrees(info) else f"serves {info.model!r}, not {self.served.info.model!r}"
        if info.vocabulary_hash in ("", self.served.info.vocabulary_hash):
            return ""
        return f"the vocabulary of {info.model!r} is not that of {self.served.info.model!r}"

    def _complain(self, known: _Known, replica: Replica) -> None:
        """Log once why a replica cannot be paired."""
        if replica.mismatch and replica.mismatch != known.warned and self.served is not None:
            logger.warning(
                "replica cannot be used", kind=known.kind, endpoint=replica.endpoint, reason=replica.mismatch
            )
            known.warned = replica.mismatch

    def _changed(self) -> None:
        """Wake who waits for a replica or a place; say whether there is a verify replica at all."""
        self._on_change()
        self._change.set()
        self._change = asyncio.Event()
        serving = self._verify_replicas_left()
        if serving is not self._serving:
            self._serving = serving
            self._on_serving(serving)

    def _report(self) -> None:
        for kind, pool in self.pools.items():
            for state in State:
                self._instruments.replicas(kind, state, pool.count(state, self._clock()))
        self._instruments.draft_pool.slots.set(self.draft_capacity().slots)
        self._instruments.kv_utilization(self._kv_utilization())

    def _kv_utilization(self) -> float:
        usable = self.pools["verify"].usable(self._clock())
        infos = [replica.info for replica in usable if replica.info is not None]
        pages = sum(info.pages for info in infos)
        return 1 - sum(info.pages_free for info in infos) / pages if pages else 0.0

    def _open_channel(self, endpoint: str, tls_name: str) -> grpc.aio.Channel:
        return open_channel(
            endpoint,
            max_message_mb=self._config.max_message_mb,
            response_bytes=RESPONSE_BYTES,
            certificates=self.certificates,
            tls_name=tls_name,
        )

    async def _close_retired(self) -> None:
        """Drafts are left for others; a verify replica keeps its sessions, which would lose their keys."""
        for kind, replica, _ in self._retired:
            if kind == "draft":
                self.pools[kind].move(replica, self._clock(), MOVES)
        idle = [entry for entry in self._retired if not entry[1].leases]
        self._retired = [entry for entry in self._retired if entry not in idle]
        for *_, channel in idle:
            await channel.close()

    async def _close_channels(self) -> None:
        for known in self._known.values():
            await known.channel.close()
        for *_, channel in self._retired:
            await channel.close()
