"""A draft replica on the virtual clock: the service's own `DraftEngine`, its thread a fiber."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from draft_service.engine import DraftEngine
from draft_service.outbox import Outbox
from outrider.config import DraftConfig
from outrider.messages import OpenDraft, TokenBlock, Verdict
from outrider.telemetry.instruments import DraftInstruments
from simulator.drafter import ScriptedDrafter
from simulator.network import Host
from simulator.timeline import Doorbell, Fiber, Timeline


class DraftReplica:
    """One replica; `host` is its event loop, which calls the methods."""

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        host: Host,
        drafter: ScriptedDrafter,
        config: DraftConfig,
        wake_seconds: float,
    ) -> None:
        self.name = name
        self.host = host
        self.drafter = drafter
        self._timeline = timeline
        self._wake_seconds = wake_seconds
        self._engine = DraftEngine(
            drafter,
            config,
            DraftInstruments(CollectorRegistry()),
            clock=timeline.clock,
            wall_ns=lambda: int(timeline.now * 1e9),
        )
        self._bell = Doorbell(timeline)
        timeline.at(0.0, Fiber(self._run).resume)

    def open(
        self, request: OpenDraft, opened: Callable[[int], None], receive: Callable[[TokenBlock], None]
    ) -> int:
        """Open a session: `opened` is told the cached length, `receive` gets its blocks."""
        key = self._engine.open(request, BlockOutbox(opened, receive))
        self._wake()
        return key

    def verdict(self, key: int, verdict: Verdict) -> None:
        """Tell a session what was committed."""
        self._engine.verdict(key, verdict)
        self._wake()

    def close(self, key: int) -> None:
        """End a session."""
        self._engine.close(key)
        self._wake()

    def _wake(self) -> None:
        self._timeline.after(self._wake_seconds, self._bell.ring)

    def _run(self) -> None:
        """The engine thread's loop."""
        while True:
            if not self._engine.step():
                self._bell.wait(None)


class BlockOutbox(Outbox):
    """Hands blocks to the replica's event loop, which is never behind."""

    def __init__(self, opened: Callable[[int], None], receive: Callable[[TokenBlock], None]) -> None:
        self._opened = opened
        self._receive = receive

    @property
    def full(self) -> bool:
        """See Outbox."""
        return False

    def admit(self, cached_length: int) -> None:
        """See Outbox."""
        self._opened(cached_length)

    def put(self, block: TokenBlock) -> None:
        """See Outbox."""
        self._receive(block)

    def close(self, error: BaseException | None = None) -> None:
        """See Outbox.

        Raises:
            BaseException: what the engine refused the session with; simulated replicas have room for all.
        """
        if error is not None:
            raise error
