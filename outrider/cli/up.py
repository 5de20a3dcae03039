"""`outrider up`: the services on this machine, each its own process, watched until the end."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from outrider.cli.fleet import Fleet
from outrider.cli.settings import Resolved
from outrider.cli.up_plan import UpConfig, plan_orchestrator, plan_replicas


def up(resolved: Resolved[UpConfig], config_file: str | None) -> int:
    """Run everything until SIGINT or SIGTERM; returns the exit status.

    Raises:
        ConfigError: a setting is wrong.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    replicas = plan_replicas(resolved, cores, gpu=Path("/dev/nvidiactl").exists())
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        replicas_file = Path(folder) / "replicas"
        orchestrator = plan_orchestrator(resolved, str(replicas_file), replicas, cores)
        fleet = Fleet(replicas, orchestrator, replicas_file, config_file, resolved.config.grace_seconds)
        return asyncio.run(fleet.run())
