"""Says where the services run: target and draft on cores of their own, where there are enough."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pairs import Pair
from outrider.cores import allowed_cores
from scripts.local_services import Deployment


def layout_of(flags: argparse.Namespace, pair: Pair, drafts: Mapping[str, Path]) -> Deployment:
    """The target on the first `flags.threads` cores, all drafts on the next; logs beside `flags.out`."""
    folder = flags.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    cores = allowed_cores()
    enough = len(cores) >= 2 * flags.threads
    return Deployment(
        target=pair.target,
        drafts=drafts,
        dtype=pair.dtype,
        weights=pair.weights,
        folder=folder,
        threads=flags.threads,
        verify_cpus=_list(cores[: flags.threads]) if enough else "",
        draft_cpus=_list(cores[flags.threads : 2 * flags.threads]) if enough else "",
    )


def _list(cores: list[int]) -> str:
    return ",".join(map(str, cores))
