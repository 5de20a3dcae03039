"""Starts a verify replica: bind the port, load the target, serve."""

from __future__ import annotations

from collections.abc import Callable

from outrider.config import VerifyConfig
from outrider.engine.loading.first_checks import check_settings
from outrider.internal.v1 import verify_pb2
from outrider.process import Service, in_thread, run_service
from outrider.rpc.serving import GrpcServer

SERVICE: str = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


async def run(config: VerifyConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    check_settings(config)
    if config.tensor_parallel == 1:
        await _serve(config, config.cpus)
    else:
        await _run_ranks(config)


async def _run_ranks(config: VerifyConfig) -> None:
    """Serve as rank 0 or follow rank 0, on this rank's part of the cores."""
    from outrider.engine.parallel.order import check_settings, cpu_share

    check_settings(config)
    rank = config.tensor_parallel_rank
    if rank == 0:
        await _serve(config, cpus=cpu_share(config, rank))
    else:
        from outrider.engine.parallel.follower import carry_out, order_of

        carry_out(order_of(config))  # blocks: nothing else happens here


async def _serve(config: VerifyConfig, cpus: str) -> None:
    await run_service(
        "verify",
        config.model_copy(update={"cpus": cpus}),
        [SERVICE],
        lambda server: _build(config, server),
        while_draining=["FetchKv"],
    )


async def _build(config: VerifyConfig, server: GrpcServer) -> Service:
    """Load while health checks are answered. The import of torch alone takes seconds."""

    def load() -> Callable[[GrpcServer], Service]:
        from verify_service.replica import load_replica

        return load_replica(config)

    return (await in_thread(load))(server)
