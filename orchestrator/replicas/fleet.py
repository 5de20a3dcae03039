"""The verify and draft replicas that a running orchestrator knows.

Discovery lists their endpoints, which may come and go. Each listed replica is probed periodically.
Sessions reserve places at the replicas, and wait while there are none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from orchestrator.replicas.discovery import Discovery
from orchestrator.replicas.kv_relay import relay
from orchestrator.replicas.pool import DraftCapacity, Replica, Replicas, ReplicaState, Reservation
from orchestrator.replicas.probe import probe
from orchestrator.replicas.retired import RetiredReplicas
from orchestrator.replicas.served import Served, ServedModel
from outrider.client.wire import in_plain_words
from outrider.config import OrchestratorConfig
from outrider.protocol.allowance import MAX_FEATURE_BYTES, MAX_FEATURE_LAYERS
from outrider.protocol.errors import ModelGone, NoReplica, OutriderError, StaleHandle, Unavailable
from outrider.protocol.messages import KvHandle, ModelInfo
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import client_certificates
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger
from outrider.telemetry.shadow_instruments import Role

logger = get_logger(__name__)
RESPONSE_BYTES = {
    "grpc.health.v1.Health": 4 << 10,
    "outrider.internal.v1.DraftService": 64 << 10,
    "outrider.internal.v1.VerifyService": 64 << 10,
    "outrider.internal.v1.VerifyService/Verify": MAX_FEATURE_BYTES + (1 << 20),
    "outrider.internal.v1.VerifyService/GetTokenizer": 64 << 20,
    "outrider.internal.v1.VerifyService/FetchKv": 16 << 20,
}
"""Largest messages of replicas in bytes, by service or method. A block of 1,024 nodes has 19 KiB, a verdict
300 bytes per token with 20 alternatives, a tokenizer tens of MiB, a KV page of a large model 8 MiB."""
MOVES = 8
"""Most sessions that leave a draining replica at once. Each costs its new replica a prefill or a transfer."""
RELAYS = 4
"""Most transfers of keys and values at once. Each keeps one message in memory and takes event loop time."""
DOWN_PROBE_SECONDS = 0.25
"""Seconds between probes of a replica that cannot be used, and between searches for the first verify replica.
They are short because requests wait."""


@dataclass(slots=True)
class _Known:
    """A replica that is probed."""

    kind: str
    channel: grpc.aio.Channel
    tls_name: str
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to probe the replica now."""
    task: asyncio.Task[None] | None = None
    warned: str = ""
    """The last warning about the replica, so that each is logged once."""
    silent: bool = False
    """True when the replica did not answer the last probe."""
    arithmetic: str = ""
    """The replica's arithmetic when it was last compared with that of the served model."""


class Fleet:
    """All replicas; `run` keeps it up to date."""

    def __init__(
        self,
        config: OrchestratorConfig,
        instruments: OrchestratorInstruments,
        on_serving: Callable[[bool], None] = lambda serving: None,
        on_round: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.certificates = client_certificates(
            config.tls_client_ca, config.tls_client_cert, config.tls_client_key
        )
        """Certificates to show to replicas and to check theirs against; None: plaintext."""
        self.pools = {
            kind: Replicas(config.breaker_failures, config.breaker_seconds) for kind in ("verify", "draft")
        }
        self._served = Served(self.pools)
        self._config = config
        self._instruments = instruments
        self._on_serving = on_serving
        self._on_round = on_round
        """Called after each discovery, which is every `discovery_seconds` once a model is served."""
        self._on_change = on_change
        """Called after every probe, and when a replica has admitted a session."""
        self._room = 0
        """Sessions of this orchestrator that verify replicas have room for; kept while none can be used."""
        self._serving = False
        self._clock = time.monotonic
        addresses = {"verify": config.verify, "draft": config.draft}
        self._discoveries = [
            Discovery.configure(kind, static, config.replicas_file) for kind, static in addresses.items()
        ]
        self._known: dict[tuple[str, str], _Known] = {}
        self._retired = RetiredReplicas(config.recovery_seconds)
        self._change = asyncio.Event()
        self._relays = asyncio.Semaphore(RELAYS)

    @property
    def served(self) -> ServedModel | None:
        """The model that is served; None before a verify replica is known."""
        return self._served.model

    async def run(self) -> None:
        """Discover and probe until cancelled."""
        try:
            async with asyncio.TaskGroup() as probes:
                while True:
                    for discovery in self._discoveries:
                        await self._take_up(discovery, await discovery.endpoints(), probes)
                    for gone in self._retired:
                        self._move_away(gone.kind, gone.replica)
                    await self._retired.close_unused(self._clock())
                    self._report()
                    self._on_round()
                    await asyncio.sleep(self._period(self.served is not None))
        finally:
            await self._close_channels()

    async def ready(self) -> None:
        """Wait until a verify replica is known and every listed replica has been probed once.

        Then the first request already finds its draft.
        """
        while self.served is None or any(
            pool.count(ReplicaState.UNKNOWN, 0.0) for pool in self.pools.values()
        ):
            await self._change.wait()

    def misfits(self) -> list[str]:
        """For each draft that answered and does not fit the served model, why it cannot be used."""
        return [replica.mismatch for replica in self.pools["draft"] if replica.mismatch]

    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the target that drafts read, ascending, at most `MAX_FEATURE_LAYERS`."""
        infos = [replica.info for replica in self.pools["draft"] if replica.info and not replica.mismatch]
        return tuple(sorted({layer for info in infos for layer in info.feature_layers})[:MAX_FEATURE_LAYERS])

    def draft_capacity(self) -> DraftCapacity:
        """The capacity of the draft pool according to the last probes."""
        usable = self.pools["draft"].usable(self._clock())
        answered = [replica for replica in self.pools["draft"] if replica.info is not None]
        slots = sum(replica.info.max_sessions for replica in usable if replica.info is not None)
        others = sum(
            replica.info.sessions - replica.reservations_at_probe
            for replica in answered
            if replica.info is not None and replica.reachable and not replica.info.shadow
        )
        return DraftCapacity(len(usable), slots, max(others, 0))

    def capacity(self) -> int:
        """How many continuations may run at once.

        While no verify replica can be used, the last number holds: continuations wait for a replica, at most
        for the recovery time.
        """
        if usable := self.pools["verify"].usable(self._clock()):
            self._room = sum(replica.room for replica in usable)
        return min(self._room, self._config.max_running or self._room)

    def admitted(self, reservation: Reservation, incarnation: str) -> None:
        """The replica of this incarnation has admitted the session."""
        reservation.incarnation = incarnation
        self._on_change()

    def channel(self, kind: str, endpoint: str) -> grpc.aio.Channel:
        """The channel to a replica.

        Raises:
            NoReplica: discovery does not list it any more.
        """
        known = self._known.get((kind, endpoint))
        if known is None:
            raise NoReplica(f"{endpoint} was taken out of service")
        return known.channel

    def reserve_draft(
        self,
        tokens: Sequence[int],
        on_lost: Callable[[OutriderError], None],
        avoid: str,
        beside: Sequence[str],
    ) -> Reservation | None:
        """Reserve a draft replica; None when none can be used now.

        It is not one of those at the endpoints `beside`, which the session has already.
        """
        return self.pools["draft"].reserve(self._clock(), on_lost, tokens=tokens, avoid=avoid, beside=beside)

    def drafts(self, state: ReplicaState) -> list[Replica]:
        """Draft replicas in a state."""
        now, pool = self._clock(), self.pools["draft"]
        return [replica for replica in pool if pool.state(replica, now) is state]

    def shadow(self) -> tuple[Replica, grpc.aio.Channel] | None:
        """The shadow with the fewest sessions, and the channel to it; None when there is none."""
        found = min(self.drafts(ReplicaState.SHADOW), key=lambda replica: replica.load, default=None)
        return None if found is None else (found, self.channel("draft", found.endpoint))

    def probe_now(self, endpoint: str) -> None:
        """Probe a draft replica at once: it has changed."""
        known = self._known.get(("draft", endpoint))
        if known is not None:
            known.poke.set()

    async def reserve_verify(
        self,
        model: ModelInfo,
        tokens: Sequence[int],
        on_lost: Callable[[OutriderError], None],
        *,
        needs_weights: bool,
        avoid: str,
        prefer: str,
        give_up_at: float,
    ) -> Reservation:
        """Reserve a verify replica with a model; wait for one until `give_up_at`, or while all are only full.

        With `needs_weights` it has to have the same weights too.

        Raises:
            NoReplica: no replica was found in time.
            ModelGone: another model is served now.
        """
        pool = self.pools["verify"]
        while True:
            if problem := self._served.gone(model, needs_weights):
                raise ModelGone(problem)
            change = self._change
            now = self._clock()
            reservation = pool.reserve(now, on_lost, tokens=tokens, avoid=avoid, prefer=prefer)
            if reservation is not None:
                return reservation
            wake_at = pool.next_change(now) or give_up_at
            if pool.usable(now):  # all usable replicas are full, which is no failure
                give_up_at = max(give_up_at, now + self._config.recovery_seconds)
            elif now >= give_up_at:
                raise NoReplica("no verify replica can be used; all are down, draining or kept out")
            else:
                wake_at = min(give_up_at, wake_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(wake_at - now):
                    await change.wait()

    async def move_kv(self, owner: str, to: str, handle: KvHandle, tokens: Sequence[int]) -> KvHandle:
        """Copy the keys and values of a handle, which covers `tokens`, between two verify replicas.

        Args:
            owner: Endpoint of the replica that has them; it may be retired.
            to: Endpoint of the replica that gets them.

        Returns:
            A handle at the replica `to`.

        Raises:
            StaleHandle: the copy failed for any reason; the tokens have to be computed again.
        """
        try:
            async with self._relays:
                channels = self._channel_of_owner(owner), self.channel("verify", to)
                moved = await relay(*channels, handle, tokens, self._config.recovery_seconds)
        except OutriderError as error:
            logger.info("keys and values not moved", owner=owner, to=to, error=str(error))
            self._instruments.kv_moves.labels("recomputed").inc()
            raise StaleHandle(f"kv_handle: not moved from {owner}: {error}") from None
        self._instruments.kv_moves.labels("moved").inc()
        return moved

    def _channel_of_owner(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to a verify replica, which may be retired."""
        try:
            return self.channel("verify", endpoint)
        except NoReplica:
            retired = self._retired.channel("verify", endpoint)
            if retired is None:
                raise
            return retired

    def failed(self, kind: str, reservation: Reservation, error: OutriderError) -> None:
        """A session lost a replica: count it against the replica, and probe the replica at once."""
        self.pools[kind].failed(reservation, error, self._clock())
        known = self._known.get((kind, reservation.replica.endpoint))
        if known is not None:
            self._warn_of_mismatch(known, reservation.replica)
            known.poke.set()

    async def _take_up(
        self, discovery: Discovery, endpoints: Sequence[str], probes: asyncio.TaskGroup
    ) -> None:
        """Begin to probe new endpoints; retire replicas that are no longer listed."""
        kind = discovery.kind
        new = [endpoint for endpoint in endpoints if (kind, endpoint) not in self._known]
        for endpoint in new:
            known = self._known[kind, endpoint] = self._begin(kind, endpoint, discovery.tls_name(endpoint))
            known.task = probes.create_task(self._watch(endpoint, known))
        for replica in self.pools[kind].set_endpoints(endpoints):
            known = self._known.pop((kind, replica.endpoint))
            assert known.task is not None
            known.task.cancel()
            self._retired.add(kind, replica, known.channel, known.tls_name)
            logger.info("replica gone", kind=kind, endpoint=replica.endpoint)

    def _begin(self, kind: str, endpoint: str, tls_name: str) -> _Known:
        """A replica that is to be probed; one that was listed before comes back with its channel."""
        back = self._retired.take_back(kind, endpoint, tls_name)
        if back is None:
            return _Known(kind, self._open_channel(endpoint, tls_name), tls_name)
        self.pools[kind].restore(back.replica)
        return _Known(kind, back.channel, tls_name)

    async def _watch(self, endpoint: str, known: _Known) -> None:
        """Probe one replica for as long as it is known."""
        while True:
            usable = await self._probe_once(endpoint, known)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period(usable)):
                    await known.poke.wait()
            known.poke.clear()

    def _period(self, well: bool) -> float:
        """Seconds until the next probe or discovery; few unless `well`: what was found can be used."""
        period = self._config.discovery_seconds
        return period if well else min(period, DOWN_PROBE_SECONDS)

    async def _probe_once(self, endpoint: str, known: _Known) -> bool:
        """Probe a replica and act on the answer; returns whether the replica can be used."""
        await self._ask(endpoint, known)
        pool = self.pools[known.kind]
        replica = pool.find(endpoint)
        if replica is None:
            return False
        self._warn_of_mismatch(known, replica)
        self._changed()
        state = pool.state(replica, self._clock())
        if state in (ReplicaState.DRAINING, ReplicaState.SHADOW):
            self._move_away(known.kind, replica)
        return state in (ReplicaState.USABLE, ReplicaState.SHADOW)

    async def _ask(self, endpoint: str, known: _Known) -> None:
        """Probe a replica and note its answer, or that none came."""
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
                self._warn_of_silence(known.kind, endpoint, error)
            known.silent = True

    def _warn_of_silence(self, kind: str, endpoint: str, error: OutriderError) -> None:
        """Log why a replica does not answer; of one that cannot be reached, also what may have to change."""
        service = f"a {kind} replica"
        plain = str(in_plain_words(error, endpoint, service, f"the port of {service}"))
        hint = {"hint": plain} if isinstance(error, Unavailable) and plain != str(error) else {}
        logger.warning("replica does not answer", kind=kind, endpoint=endpoint, error=str(error), **hint)

    def _move_away(self, kind: str, replica: Replica) -> None:
        """Make sessions leave a replica that goes out of service.

        They stay at a verify replica whose keys and values cannot be moved.
        """
        if kind == "draft" or (replica.info is not None and replica.info.kv_layout):
            self.pools[kind].move(replica, self._clock(), MOVES)

    async def _take_in(self, endpoint: str, known: _Known, info: ModelInfo, serving: bool) -> None:
        """Take in what a replica says it serves."""
        if known.kind == "verify" and serving:
            await self._served.consider(info, known.channel)
        self.pools[known.kind].seen(endpoint, info, serving, self._served.mismatch(known.kind, info))
        if known.kind == "verify" and known.arithmetic != info.arithmetic:
            known.arithmetic = info.arithmetic
            self._served.compare_arithmetic(endpoint, info)

    def _warn_of_mismatch(self, known: _Known, replica: Replica) -> None:
        """Log once why a replica cannot be paired."""
        if replica.mismatch and replica.mismatch != known.warned and self.served is not None:
            logger.warning(
                "replica cannot be used", kind=known.kind, endpoint=replica.endpoint, reason=replica.mismatch
            )
            known.warned = replica.mismatch

    def _changed(self) -> None:
        """Wake those that wait for a replica or a place; report whether a verify replica is available."""
        self._on_change()
        self._change.set()
        self._change = asyncio.Event()
        serving = self._served.available
        if serving is not self._serving:
            self._serving = serving
            self._on_serving(serving)

    def _report(self) -> None:
        for kind, pool in self.pools.items():
            for state in ReplicaState:
                self._instruments.replicas.labels(kind, state).set(pool.count(state, self._clock()))
        self._instruments.shadows.replicas(
            (replica.endpoint, replica.info.draft_name, Role.SHADOW if replica.info.shadow else Role.SERVING)
            for replica in self.pools["draft"]
            if replica.info is not None
        )
        self._instruments.draft_pool.slots.set(self.draft_capacity().slots)
        self._instruments.kv_utilization.set(self._kv_utilization())

    def _kv_utilization(self) -> float:
        usable = self.pools["verify"].usable(self._clock())
        infos = [replica.info for replica in usable if replica.info is not None]
        pages = sum(info.pages for info in infos)
        return 1 - sum(info.pages_free for info in infos) / pages if pages else 0.0

    def _open_channel(self, endpoint: str, tls_name: str) -> grpc.aio.Channel:
        return open_channel(
            endpoint,
            response_bytes=RESPONSE_BYTES,
            certificates=self.certificates,
            tls_name=tls_name,
        )

    async def _close_channels(self) -> None:
        for known in self._known.values():
            await known.channel.close()
        await self._retired.close_all()
