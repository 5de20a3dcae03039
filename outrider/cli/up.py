"""`outrider up`: the services on this machine, each its own process, watched until the end."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.cli.autoscaler import Autoscaler, DraftPool
from outrider.cli.fleet import Fleet, Scaling
from outrider.cli.settings import Resolved
from outrider.cli.up_plan import ChildSpec, UpConfig, plan_orchestrator, plan_replicas


def up(resolved: Resolved[UpConfig], config_file: str | None) -> int:
    """Run everything until SIGINT or SIGTERM; returns the exit status.

    Raises:
        ConfigError: a setting is wrong.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    replicas = plan_replicas(resolved, cores, gpu=Path("/dev/nvidiactl").exists())
    scaling = _scaling(resolved.config, replicas)
    spare = set() if scaling is None else {spec.name for spec in scaling.pool.specs} - {*scaling.pool.running}
    first = [spec for spec in replicas if spec.name not in spare]
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        replicas_file = Path(folder) / "replicas"
        orchestrator = plan_orchestrator(resolved, str(replicas_file), replicas, cores)
        fleet = Fleet(
            first, orchestrator, replicas_file, config_file, resolved.config.grace_seconds, scaling=scaling
        )
        return asyncio.run(fleet.run())


def _scaling(config: UpConfig, replicas: Sequence[ChildSpec]) -> Scaling | None:
    """How drafts come and go; None when their number is fixed."""
    least, most = config.draft_range
    if least == most:
        return None
    drafts = [spec for spec in replicas if spec.service == "draft"]
    pool = DraftPool(drafts, [spec.name for spec in drafts[:least]])
    return Scaling(pool, Autoscaler(least, most, config.drafts_down_seconds))
