"""Compares Outrider's modes with other engines, which take turns on the same models and cores.

    python -m benchmarks.compare                                  own arms and transformers
    python -m benchmarks.compare --vllm PYTHON --llama SERVER --llama-source FOLDER

Every arm stays alive over the run and serves the same prompts in turn: A B C, A B C, ... Greedy texts are
compared; see benchmarks/equality.py. Exit status 1: a text is wrong, or a draft had nothing accepted.
docs/benchmarks.md explains the columns. The table goes to standard output, everything as JSON to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import machine, pairs, workload
from benchmarks.arms import peers
from benchmarks.arms.base import OWN, Arm
from benchmarks.arms.own import MODES, Client, OwnArm
from benchmarks.equality import Judgement, compare, judge_all
from benchmarks.flags import command, json_file
from benchmarks.floor import measure_floor
from benchmarks.layout import layout_of
from benchmarks.pairs import Pair, load_pair
from benchmarks.report import ResultRow, equality_lines, floor_lines, rows, tables
from benchmarks.samples import Batch, SampledRequest
from benchmarks.workload import Cell, Turn, Workload, load_workload, turns
from outrider.cores import allowed_cores
from scripts.child import ROOT, ChildError
from scripts.console import new_parser, progress, run
from scripts.local_services import fleet

WARM_UP_TOKENS = 8


def main() -> int:
    """Start all arms, measure, judge, print and write."""
    flags = parse()
    pair = load_pair(flags)
    work = load_workload(flags, pair.target)
    plan = list(turns(grid(flags), flags.requests, flags.min_turns, len(work.prompts)))
    floor = measure_floor(pair.target, pair.dtype, len(allowed_cores()), pair.weights)
    with running_arms(flags, pair) as arms:
        batches = measure(arms, work, plan)
    table = rows(batches, arms)
    engines = "; ".join(dict.fromkeys(arm.engine for arm in arms))
    about = {**machine.describe(), "engines": engines, **setting(flags, pair), "floor": str(floor)}
    print(machine.lines(about), tables(table), *floor_lines(table, floor), sep="\n", flush=True)
    progress(f"{len(arms)} arms measured; comparing texts")
    tallies, differences = compare(batches, {arm.name: arm.kind for arm in arms})
    judgements = judge_all(pair, work, differences)
    print(*equality_lines(tallies, judgements), sep="\n")
    write(flags.out, about, table, batches, judgements)
    return verdict(silent(arms, batches), [one for one in judgements if not one.near_tie])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    workload.add_flags(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--round-trip-ms", type=float, nargs="+", default=[0.0], help="network to the replicas"
    )
    parser.add_argument("--requests", type=int, default=12, help="requests per arm and cell, at least")
    parser.add_argument("--min-turns", type=int, default=2, help="turns per arm and cell, at least")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="own arms")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each service")
    parser.add_argument("--out", type=json_file, default=ROOT / "out/compare.json")
    peers.add_flags(parser)
    return parser.parse_args()


def grid(flags: argparse.Namespace) -> list[Cell]:
    """All cells that the flags span."""
    return [
        Cell(round_trip, concurrency, temperature)
        for round_trip in flags.round_trip_ms
        for concurrency in flags.concurrency
        for temperature in flags.temperatures
    ]


@contextmanager
def running_arms(flags: argparse.Namespace, pair: Pair) -> Iterator[list[Arm]]:
    """Start all arms and yield them; their processes end with the block, however it ends."""
    layout = layout_of(flags, pair, {"demo": pair.draft})
    with ExitStack() as stack:
        progress("starting the services")
        services = stack.enter_context(fleet(layout))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        client = Client(services, runner)
        arms: list[Arm] = [OwnArm(mode, client) for mode in flags.modes]
        shared = peers.Setting(flags, pair, tuple(allowed_cores()), layout.folder, max(flags.concurrency))
        arms += peers.peers(shared, stack)
        yield arms


def warm_up(arms: Sequence[Arm], work: Workload, cells: Sequence[Cell]) -> None:
    """Run every arm in every cell. Kernels are made at the first use of a size, and speculation meets many:
    own arms run whole requests, once per concurrency; peers have compiled theirs at their start.

    Raises:
        ChildError: a draft proposed nothing, which is better known now than after the run.
    """
    done: set[tuple[str, int]] = set()
    for cell in cells:
        for arm in arms:
            size = arm.name, cell.concurrency
            whole = arm.kind == OWN and size not in done
            done.add(size)
            if arm.runs(cell):
                prompts = [work.prompts[i % len(work.prompts)] for i in range(cell.concurrency)]
                found = arm.run(cell, prompts, work.tokens if whole else WARM_UP_TOKENS)
                if cell == cells[0] and arm.kind == OWN and arm.speculates and not drafted(found):
                    raise ChildError(f"the draft proposed nothing to {arm.name}; see its log")


def drafted(requests: Sequence[SampledRequest]) -> bool:
    """True if a draft proposed something for one of these requests, which are own arms'."""
    return any(request.extra["drafted"] > 0 for request in requests)


def measure(arms: Sequence[Arm], work: Workload, plan: Sequence[Turn]) -> list[Batch]:
    """Run every turn on every arm, each turn beginning with another arm, after a round to warm up."""
    warm_up(arms, work, sorted({turn.cell for turn in plan}))
    found: list[Batch] = []
    started = time.monotonic()
    for number, turn in enumerate(plan):
        first = number % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            if arm.runs(turn.cell):
                found.append(Batch(arm.name, turn, tuple(arm.run(turn.cell, work.of(turn), work.tokens))))
        done, seconds = number + 1, time.monotonic() - started
        progress(f"{done} of {len(plan)} turns after {seconds:.0f} s ({turn.cell})")
    return found


def silent(arms: Sequence[Arm], batches: Sequence[Batch]) -> list[str]:
    """Own arms that speculate and had no drafted token accepted."""
    lengths: dict[str, float] = {}
    for batch in batches:
        lengths[batch.arm] = max(lengths.get(batch.arm, 0.0), batch.figures()["length"])
    own = [arm.name for arm in arms if arm.kind == OWN and arm.speculates]
    return [name for name in own if lengths.get(name, 0.0) <= 1.0]


def setting(flags: argparse.Namespace, pair: Pair) -> dict[str, str]:
    """Lines that say how the comparison was run."""
    return {
        "pair": f"{pair.target} ({pair.dtype}, weights {pair.weights}), draft {pair.draft}",
        "pinning": f"own target on the first {flags.threads} core(s), draft on the next, one process each, "
        "which helps with the target's long steps and runs the orchestrator; "
        "peers on the first cores, as many as threads",
        "threads": f"own {flags.threads} per service, peers {flags.peer_threads}",
        "workload": f"prompts of at most {flags.prompt_tokens} tokens, {flags.tokens} new tokens",
        "command": command("compare"),
    }


def write(
    path: Path,
    about: Mapping[str, str],
    table: Sequence[ResultRow],
    batches: Sequence[Batch],
    judgements: Sequence[Judgement],
) -> None:
    """Write everything that was measured as JSON."""
    result = {
        "about": about,
        "rows": [asdict(row) for row in table],
        "batches": [record(batch) for batch in batches],
        "differences": [asdict(one) | {"near_tie": one.near_tie} for one in judgements],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def record(batch: Batch) -> dict[str, Any]:
    """A batch as it is written to the result."""
    return {
        "arm": batch.arm,
        "turn": asdict(batch.turn),
        "figures": batch.figures(),
        "tokens": [request.tokens for request in batch.requests],
    }


def verdict(silent: Sequence[str], wrong: Sequence[object]) -> int:
    """Exit status, after saying why it is not 0."""
    for name in silent:
        progress(f"{name}: no drafted token was accepted; its figures say nothing")
    if wrong:
        progress(f"{len(wrong)} texts differ where the target was sure")
    return 1 if silent or wrong else 0


if __name__ == "__main__":
    run(main)
