"""Measures speculation under load: OFF against AUTO by concurrency, with a good and a bad draft.

    python -m benchmarks.load --concurrency 1 2 4 8 16 32 64

Every client sends its requests one after another. Tokens are counted until the last one is sent, as long as
all clients are busy.

All arms use one verify replica; two draft replicas share a core, and one of them has noise on its weights.
The budget rule should verify fewer nodes as concurrency grows and as drafts get worse, and never make AUTO
slower than OFF. How well the estimates behind it fit is read from the verify service's counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import uvloop
from safetensors.torch import load_file, save_file

from benchmarks import machine, pairs, workload
from benchmarks.arms.base import Arm
from benchmarks.arms.own import Client, OwnArm
from benchmarks.calibration import Bin, Observed, bins
from benchmarks.compare import measure
from benchmarks.flags import command, json_file
from benchmarks.layout import layout_of
from benchmarks.pairs import load_pair
from benchmarks.plot import draw_load
from benchmarks.report import ResultRow, rows
from benchmarks.samples import Spread
from benchmarks.workload import Cell, load_workload, turns
from scripts.child import ROOT
from scripts.console import new_parser, progress, run
from scripts.local_services import fleet

GOOD, BAD = "good", "bad"
STEADY = "steady_s"
IN_A_ROW = 3
"""Requests of each client, one after another."""
HEADING = "\nat once  arm                 tokens/s               ÷ off  length  verified  drafted"


def main() -> int:
    """Measure, print and write."""
    flags = parse()
    pair = load_pair(flags)
    work = load_workload(flags, pair.target)
    cells = [Cell(0.0, concurrency, flags.temperature) for concurrency in flags.concurrency]
    plan = list(turns(cells, flags.requests, flags.min_turns, len(work.prompts), IN_A_ROW))
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        drafts = {GOOD: pair.draft, BAD: noised_copy(pair.draft, Path(folder) / BAD)}
        progress("starting the services")
        with fleet(layout_of(flags, pair, drafts)) as services:
            client = Client(services, runner)
            autos = {
                draft: Observed(services, "auto", client, draft, f"auto, {draft} draft") for draft in drafts
            }
            arms: list[Arm] = [OwnArm("off", client, GOOD), *autos.values()]
            batches = measure(arms, work, plan)
    title = f"{pair.name}, {pair.dtype}, T = {flags.temperature:g}"
    table = rows(batches, arms, STEADY)
    report(table, {draft: bins(arm.counts) for draft, arm in autos.items()}, title, flags)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    workload.add_flags(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--requests", type=int, default=8, help="requests per arm and concurrency, at least")
    parser.add_argument("--min-turns", type=int, default=3, help="turns per arm and concurrency, at least")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each service")
    parser.add_argument("--out", type=json_file, default=ROOT / "out/load.json")
    return parser.parse_args()


def report(
    table: Sequence[ResultRow],
    calibration: Mapping[str, Sequence[Bin]],
    title: str,
    flags: argparse.Namespace,
) -> None:
    """Print both tables; write them and a picture."""
    about = machine.describe() | {"command": command("load")}
    print(machine.lines(about))
    print(HEADING)
    for row in table:
        print(load_line(row))
    for draft, found in calibration.items():
        print(f"\n{draft} draft: nodes by estimate: estimated, accepted, verified")
        print("\n".join(f"{one.predicted:10.3f}{one.observed:10.3f}{one.nodes:10.0f}" for one in found))
    draw_load(table, calibration, f"{title}; {about['cpu']}, {about['date']}", flags.out.with_suffix(".png"))
    result = {
        "about": about,
        "rows": [asdict(row) for row in table],
        "calibration": {draft: [asdict(one) for one in found] for draft, found in calibration.items()},
    }
    flags.out.write_text(json.dumps(result, indent=1) + "\n")


def load_line(row: ResultRow) -> str:
    """One arm at one concurrency; nodes are per session and step."""
    figures = row.figures
    ratio = row.against_off or Spread(1.0, 1.0, 1.0)
    return (
        f"{row.cell.concurrency:7}  {row.arm:18}{figures[STEADY].middle:10.1f}"
        f"{ratio.middle:7.2f} [{ratio.low:.2f}, {ratio.high:.2f}]{figures['length'].middle:8.2f}"
        f"{figures['verified'].middle:10.2f}{figures['drafted'].middle:9.2f}"
    )


def noised_copy(source: Path, destination: Path) -> Path:
    """A bad draft: a copy whose matrices have normal noise on them, of their own deviation."""
    generator = torch.Generator().manual_seed(0)
    shutil.copytree(source, destination, dirs_exist_ok=True)
    for shard in destination.glob("*.safetensors"):
        tensors = load_file(shard)
        noised = {name: _noised(weight, generator) for name, weight in tensors.items()}
        save_file(noised, shard, metadata={"format": "pt"})
    return destination


def _noised(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if weight.ndim < 2:
        return weight
    change = torch.randn(weight.shape, generator=generator) * weight.float().std()
    return (weight.float() + change).to(weight.dtype)


if __name__ == "__main__":
    run(main)
