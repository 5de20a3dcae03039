"""The shadows of all sessions of this process, and the promotion of one that proved to be better."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from orchestrator.openings import open_draft
from orchestrator.replicas.fleet import Fleet
from orchestrator.replicas.pool import ReplicaState
from orchestrator.session import Session
from orchestrator.shadow.comparison import Comparisons, Swap, swap_of
from orchestrator.shadow.shadow import Shadow
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import OutriderError
from outrider.rpc.draft_admin import set_shadow
from outrider.speculation.candidate_tree import first_id_of
from outrider.telemetry.logs import get_logger
from outrider.telemetry.shadow_instruments import ShadowInstruments

logger = get_logger(__name__)


class Shadows:
    """Gives a share of the sessions a shadow, as long as there is a replica for one."""

    def __init__(self, config: OrchestratorConfig, fleet: Fleet, instruments: ShadowInstruments) -> None:
        self.comparisons = Comparisons()
        self._config = config
        self._fleet = fleet
        self._instruments = instruments
        self._streams: set[asyncio.Task[None]] = set()
        self._swapping: asyncio.Task[None] | None = None

    def begin(self, session: Session) -> Shadow | None:
        """Start a shadow of a session that has drafts, at its last committed token; mostly None."""
        if random.random() >= self._config.shadow_share:
            return None
        found = self._fleet.shadow()
        if found is None:
            return None
        replica, channel = found
        assert replica.info is not None, "it has said that it is a shadow"
        shadow = Shadow(
            open_draft(session, first_id_of(0)),
            replica.info,
            self.comparisons,
            self._instruments,
        )
        shadow.start(replica.endpoint, channel, self._config.draft_open_timeout_ms / 1000, self._streams)
        return shadow

    def promote_winner(self) -> None:
        """Promote a shadow that has won, if `promote_shadows` is set."""
        if not self._config.promote_shadows or (self._swapping is not None and not self._swapping.done()):
            return
        swap = swap_of(
            self._fleet.drafts(ReplicaState.SHADOW), self._fleet.drafts(ReplicaState.USABLE), self.comparisons
        )
        if swap is not None:
            self._swapping = asyncio.create_task(self._swap(swap))

    async def close(self) -> None:
        """End the streams that are left."""
        for task in (*self._streams, *([self._swapping] if self._swapping else [])):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _swap(self, swap: Swap) -> None:
        """Put the better draft into use, then make the other one a shadow: one is always in use."""
        try:
            for endpoint, version, shadow in (
                (swap.up, swap.up_version, False),
                (swap.down, swap.down_version, True),
            ):
                channel = self._fleet.channel("draft", endpoint)
                await set_shadow(channel, shadow, version)
                self._fleet.probe_now(endpoint)
        except OutriderError as error:
            logger.warning("a better draft could not be promoted", endpoint=swap.up, error=str(error))
            return
        self._instruments.promoted()
        logger.info(
            "a better draft was promoted",
            endpoint=swap.up,
            version=swap.up_version,
            before=swap.down_version,
            gain=round(swap.gain, 3),
        )
