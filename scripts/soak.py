"""Hours of mixed load with faults: latency percentiles, memory and violations over time.

    python -m scripts.soak --minutes 60 --seed 1 --out out/soak

Writes soak.json and soak.png. The load and the faults are those of tests/faults (docs/faults.md). `verify-a`,
`draft-a` and `orchestrator-a` are never killed, so that their memory is observed over a long life, but they
have all other faults. The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.console import new_parser, progress
from scripts.console import run as run_to_end
from tests.faults.harness.load import Finished
from tests.faults.harness.plan import DRAFTS, ORCHESTRATORS, VERIFIES, Manner, Mix
from tests.faults.harness.run import Options, Report, percentiles, run
from tests.faults.harness.watch import growth

mpl.use("Agg")
WINDOWS = 60
"""Most points of a line; each stands for at least `SHORTEST_WINDOW`."""
SHORTEST_WINDOW = 10.0
PERCENTILES = {"p50": "#4a5fd0", "p95": "#d9603b", "p99": "#b4bac6"}
LONG_LIVED = (VERIFIES[0], DRAFTS[0], ORCHESTRATORS[0])
MEMORY_COLORS = dict(zip(LONG_LIVED, ("#4a5fd0", "#d9603b", "#2f9e6e"), strict=True))
FLAT = 0.05
"""Largest growth, as a share, from the second to the last quarter of a long life that counts as flat."""
SETTLED_SECONDS = 600.0
"""Least seconds of a life that tell about growth: caches and allocators fill up first."""


def windows(report: Report) -> list[tuple[float, list[Finished]]]:
    """Requests by the time at which they ended, in minutes from the start; empty windows are left out."""
    width = max(SHORTEST_WINDOW, report.seconds / WINDOWS)
    found: dict[int, list[Finished]] = {}
    for one in report.finished:
        found.setdefault(int((one.at - report.began) / width), []).append(one)
    return [((number + 0.5) * width / 60, found[number]) for number in sorted(found)]


def growing(report: Report) -> list[str]:
    """Processes that lived long and whose memory kept growing."""
    figures = [growth(life) for life in report.lives if len(life.memory) >= 8]
    return [
        f"{one['name']}: memory grew by {one['growth']:.1%} between its second and its last quarter"
        for one in figures
        if one["seconds"] >= SETTLED_SECONDS and one["growth"] > FLAT
    ]


def draw(report: Report, path: Path) -> None:
    """Draw latency percentiles and memory over time, with a tick for each fault."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    first, whole, memory = figure.subplots(3, 1, sharex=True)
    points = windows(report)
    for panel, name, label in (
        (first, "first_token_seconds", "first token, s"),
        (whole, "seconds", "whole request, s"),
    ):
        _latency(panel, [(at, [getattr(one, name) for one in group]) for at, group in points], label)
    for life in report.lives:
        color = MEMORY_COLORS.get(life.name)
        if color is not None:
            times = [at / 60 for at, _ in life.memory]
            memory.plot(times, [mib for _, mib in life.memory], color=color, label=life.name, linewidth=1)
    memory.set_ylim(bottom=0)
    memory.set_ylabel("resident memory, MiB", fontsize=9)
    memory.set_xlabel("minutes", fontsize=9)
    memory.legend(fontsize=8)
    for panel in (first, whole, memory):
        panel.plot(
            [one.at / 60 for one in report.recoveries], [0.0] * len(report.recoveries), "|", color="#888"
        )
        panel.spines[["top", "right"]].set_visible(False)
    requests = sum(report.outcomes.values())
    figure.suptitle(
        f"{requests} requests, {len(report.recoveries)} faults (ticks) in {report.seconds / 60:.0f} minutes, "
        f"seed {report.seed}: {len(report.violations)} violations",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _latency(panel: Axes, points: Sequence[tuple[float, list[float]]], label: str) -> None:
    for name, color in PERCENTILES.items():
        panel.plot(
            [at for at, _ in points],
            [percentiles(values)[name] for _, values in points],
            color=color,
            label=name,
        )
    panel.set_ylim(bottom=0)
    panel.set_ylabel(label, fontsize=9)
    panel.legend(fontsize=8)


def main() -> int:
    """Run, write the results, and print which promises were broken."""
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    flags = parser.parse_args()
    mix = Mix(manners={**Mix().manners, Manner.DISAPPEAR: 1}, longest=9.0, spacing=30, spared=LONG_LIVED)
    options = Options(
        seed=flags.seed,
        seconds=60 * flags.minutes,
        workers=6,
        cases=60,
        tokens=64,
        long_prompts=4,
        mix=mix,
        folder=flags.out / "logs",
        say=progress,
    )
    report = run(options)
    report.violations += growing(report)
    report.write(flags.out / "soak.json")
    draw(report, flags.out / "soak.png")
    print(json.dumps(report.summary(), indent=1))
    return 1 if report.violations else 0


if __name__ == "__main__":
    run_to_end(main)
