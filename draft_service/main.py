"""Starts a draft replica: load the drafter, start its engine, serve."""

from __future__ import annotations

import asyncio
from functools import partial

from draft_service.core import DraftCore
from draft_service.engine import DraftEngine
from draft_service.exchange import WeightExchange
from draft_service.files import files_of
from draft_service.load import load_drafter, load_grammars
from draft_service.servicer import DraftServicer
from outrider.config import DraftConfig
from outrider.engine.loading.first_checks import check_settings
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.process import in_thread, run_service
from outrider.protocol.errors import ConfigError, OutriderError
from outrider.rpc.engine_shell import end_process
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.device_memory import device_memory
from outrider.telemetry.instruments import DraftInstruments

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


async def run(config: DraftConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    check_settings(config)
    await run_service("draft", config, [SERVICE], lambda server: _build(config, server))


class DraftReplica:
    """A running replica."""

    def __init__(self, engine: DraftEngine, exchange: WeightExchange | None = None) -> None:
        self._engine = engine
        self._watching = asyncio.create_task(exchange.run()) if exchange is not None else None

    @property
    def failure(self) -> OutriderError | None:
        """See `outrider.process.Service`."""
        return self._engine.failure

    def running(self) -> int:
        """Number of open sessions."""
        return self._engine.sessions

    async def close(self) -> None:
        """Stop the engine."""
        if self._watching is not None:
            self._watching.cancel()
        await self._engine.stop()


async def _build(config: DraftConfig, server: GrpcServer) -> DraftReplica:
    files = files_of(config.model)
    drafter, info = await in_thread(lambda: load_drafter(config, server.replica))
    if config.reload_model and not hasattr(drafter, "exchange"):
        raise ConfigError(f"reload_model: a {info.kind} draft has no weights to exchange; leave it out")
    grammars = await in_thread(lambda: load_grammars(config, info))
    instruments = DraftInstruments()
    instruments.files.watch(server.watched)
    if info.version:
        instruments.weights(info.version)
    instruments.capacity.set(config.max_sessions, lambda: device_memory(info.device))
    engine = DraftEngine(
        lambda deliver: DraftCore(drafter, config, instruments, deliver, eos_token_ids=info.eos_token_ids),
        config,
        on_failure=end_process,
    )
    servicer = DraftServicer(engine, info, grammars)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)  # type: ignore[no-untyped-call]
    engine.start()
    if not config.reload_model:
        return DraftReplica(engine)
    reload = partial(load_drafter, config, server.replica)
    exchange = WeightExchange(config.model, drafter, reload, files, engine, servicer, instruments)
    return DraftReplica(engine, exchange)
