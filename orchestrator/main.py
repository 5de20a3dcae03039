"""The orchestrator process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from orchestrator.observing.scaler import Scaler
from orchestrator.observing.scaler_servicer import ScalerServicer
from orchestrator.replicas.fleet import Fleet
from orchestrator.request.auth import BearerAuth, read_tokens
from orchestrator.request.memory import MemoryReturn, resident_bytes, trim_heaps
from orchestrator.servicer import GenerationServicer
from outrider.config import OrchestratorConfig
from outrider.internal.keda import externalscaler_pb2_grpc
from outrider.process import in_thread, run_service
from outrider.protocol.errors import ConfigError, OutriderError
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger
from outrider.v1 import generation_pb2_grpc

logger = get_logger(__name__)
SERVICE = "outrider.v1.GenerationService"


class Orchestrator:
    """What the process runs: the public servicer and the fleet behind it."""

    failure: OutriderError | None = None
    """Always None: health reports failures here. See `outrider.process.Service`."""

    def __init__(
        self,
        config: OrchestratorConfig,
        instruments: OrchestratorInstruments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when an address does not parse or a file cannot be read."""
        if not config.verify and not config.replicas_file:
            raise ConfigError("verify: name at least one verify replica, or a replicas_file")
        self.fleet = Fleet(config, instruments, self._on_serving, self._on_round, self._on_change)
        self.servicer = GenerationServicer(config, self.fleet, instruments, clock)
        self.scaler = ScalerServicer(
            Scaler(config.draft_sessions_per_replica, config.discovery_seconds),
            self.fleet,
            self.servicer.observers.load,
            instruments.draft_pool,
        )
        self.tokens = read_tokens(config.auth_tokens_file) if config.auth_tokens_file else None
        self._require_fit = config.require_fit
        self._instruments = instruments
        self._server: GrpcServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._memory: asyncio.Task[None] | None = None

    async def start(self, server: GrpcServer) -> Orchestrator:
        """Register the servicer, find the replicas, and return when one can verify.

        Raises:
            ConfigError: with `require_fit`, a draft does not fit the target.
        """
        self._server = server
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self.servicer, server.server
        )
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(  # type: ignore[no-untyped-call]
            self.scaler, server.server
        )
        for files in (self.tokens, self.fleet.certificates):
            if files is not None:
                server.watched.append(files)
        self._instruments.files.watch(server.watched)
        self._memory = asyncio.create_task(MemoryReturn(resident_bytes, trim_heaps).run())
        self._watching = asyncio.create_task(self.fleet.run())
        self._watching.add_done_callback(self._on_watch_end)
        try:
            await self._ready(self._watching)
            self._check_fit()
        except BaseException:
            await self.close()
            raise
        return self

    def running(self) -> int:
        """Requests that a drain waits for."""
        queue = self.servicer.admission.queue
        waiting = self.servicer.tokenizing.waiting + self.servicer.checking.waiting
        return queue.begun + queue.queued + waiting

    async def close(self) -> None:
        """Stop watching the replicas, and end the processes that tokenize and check constraints."""
        self._server = None
        await self.servicer.tokenizing.close()
        await self.servicer.checking.close()
        await self.servicer.shadows.close()
        if self.servicer.collector is not None:
            await in_thread(self.servicer.collector.close)
        for task in (self._memory, self._watching):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _ready(self, watching: asyncio.Task[None]) -> None:
        """Wait for the first verify replica; a watch that fails ends the process."""
        ready = asyncio.create_task(self.fleet.ready())
        try:
            await asyncio.wait({ready, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            ready.cancel()

    def _check_fit(self) -> None:
        """Raise ConfigError for a draft that does not fit: otherwise only the log would tell of it."""
        misfits = self.fleet.misfits() if self._require_fit else []
        if misfits:
            raise ConfigError(f"draft: {misfits[0]}, or use lookup")

    def _on_watch_end(self, watching: asyncio.Task[None]) -> None:
        """The watch over the replicas has ended. Unless it was cancelled, this is a bug: stop serving."""
        if not watching.cancelled():
            logger.critical("the watch over the replicas has failed", exc_info=watching.exception())
            if self._server is not None:
                self._server.set_serving(False)

    def _on_round(self) -> None:
        """The fleet has finished a round of discovery."""
        self.scaler.observe()
        self.servicer.shadows.promote_winner()

    def _on_change(self) -> None:
        """A replica has changed: there may be places for requests that wait."""
        self.servicer.admission.give_places()

    def _on_serving(self, serving: bool) -> None:
        """Report in health that verify replicas came or went. Without one, requests wait for it."""
        if self._server is not None:
            self._server.set_ready(serving)


async def run(config: OrchestratorConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: a setting is wrong.
    """
    instruments = OrchestratorInstruments()
    orchestrator = Orchestrator(config, instruments)
    interceptors = [BearerAuth(SERVICE, orchestrator.tokens)] if orchestrator.tokens else []
    await run_service("orchestrator", config, [SERVICE], orchestrator.start, interceptors)
