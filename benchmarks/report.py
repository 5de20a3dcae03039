"""Makes the tables of a comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.arms.base import OWN, Arm
from benchmarks.equality import EqualityTally, Judgement
from benchmarks.floor import Floor
from benchmarks.samples import Batch, Figures, Spread, paired_ratio
from benchmarks.workload import Cell

SPEED = "tokens_s"


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One arm in one cell."""

    cell: Cell
    arm: str
    kind: str
    devices: int
    batches: int
    figures: dict[str, Spread]
    against_off: Spread | None
    against_best_peer: Spread | None
    best_peer: str


def rows(batches: Sequence[Batch], arms: Sequence[Arm], speed: str = SPEED) -> list[ResultRow]:
    """A row for every arm in every cell that it ran, in the order of cells and arms; `speed` is compared."""
    cells = sorted({batch.turn.cell for batch in batches})
    return [row for cell in cells for row in _of_cell(cell, batches, arms, speed)]


def _of_cell(cell: Cell, batches: Sequence[Batch], arms: Sequence[Arm], speed: str) -> Iterable[ResultRow]:
    found: dict[str, dict[int, Figures]] = {}
    for batch in batches:
        if batch.turn.cell == cell:
            found.setdefault(batch.arm, {})[batch.turn.index] = batch.figures()
    speeds = {name: {at: one[speed] for at, one in of.items()} for name, of in found.items()}
    peers = {arm.name for arm in arms if arm.kind != OWN and arm.name in speeds}
    best = max(peers, key=lambda name: Spread.of(list(speeds[name].values())).middle, default="")
    for arm in arms:
        if arm.name in found:
            mine = speeds[arm.name]
            off, peer = (paired_ratio(mine, speeds.get(name, {})) for name in ("off", best))
            figures = spreads(list(found[arm.name].values()))
            yield ResultRow(cell, arm.name, arm.kind, arm.devices, len(mine), figures, off, peer, best)


def spreads(figures: Sequence[Figures]) -> dict[str, Spread]:
    """Median and quartiles of every figure that all have."""
    names = [name for name in figures[0] if all(name in one for one in figures)]
    return {name: Spread.of([one[name] for one in figures]) for name in names}


Column = tuple[str, int, Callable[[ResultRow], str]]
"""Heading, width, text of a row."""


def _figure(name: str, form: str) -> Callable[[ResultRow], str]:
    return lambda row: format(row.figures[name].middle, form) if name in row.figures else "-"


def _overlap(row: ResultRow) -> str:
    """How much draft and target overlap; the target alone overlaps with nothing."""
    return "-" if row.arm == "off" else _figure("overlap", ".0%")(row)


def _speed(row: ResultRow) -> str:
    speed = row.figures[SPEED]
    return f"{speed.middle:.1f} [{speed.low:.1f}, {speed.high:.1f}]"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.middle:.2f} [{spread.low:.2f}, {spread.high:.2f}]"


COLUMNS: tuple[Column, ...] = (
    ("arm", -22, lambda row: row.arm),
    ("cores", 5, lambda row: str(row.devices)),
    ("n", 3, lambda row: str(row.batches)),
    ("tokens/s", 22, _speed),
    ("÷ off", 18, lambda row: _ratio(row.against_off)),
    ("÷ best peer", 18, lambda row: _ratio(row.against_best_peer)),
    ("decode/s", 8, _figure("decode_s", ".1f")),
    ("TTFT ms", 8, _figure("ttft_ms", ".1f")),
    ("gap p50", 8, _figure("gap_p50_ms", ".1f")),
    ("p99 ms", 7, _figure("gap_p99_ms", ".1f")),
    ("length", 6, _figure("length", ".2f")),
    ("idle", 6, _figure("idle", ".1%")),
    ("eff.", 6, _figure("efficiency", ".1%")),
    ("overlap", 7, _overlap),
)


def line(texts: Iterable[str], columns: Sequence[Column]) -> str:
    """One line of a table; a negative width aligns to the left."""
    cut = [
        f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"
        for text, (_, width, _) in zip(texts, columns, strict=True)
    ]
    return "  ".join(cut)


def tables(found: Sequence[ResultRow]) -> str:
    """A table per cell."""
    parts: list[str] = []
    for cell in dict.fromkeys(row.cell for row in found):
        here = [row for row in found if row.cell == cell]
        parts += ["", f"{cell}; best peer: {here[0].best_peer or 'none'}"]
        parts.append(line((heading for heading, _, _ in COLUMNS), COLUMNS))
        parts += [line((text(row) for _, _, text in COLUMNS), COLUMNS) for row in here]
    return "\n".join(parts)


def floor_lines(found: Sequence[ResultRow], floor: Floor) -> Iterable[str]:
    """Lines about how far one session without speculation is from what the memory allows."""
    yield ""
    for row in found:
        if row.arm == "off" and row.cell.concurrency == 1:
            step = 1.0 / row.figures["decode_s"].middle
            counts = range(1, len(floor.bandwidths) + 1)
            each = ", ".join(f"{step / floor.seconds(cores):.2f} by {cores}" for cores in counts)
            yield f"off, {row.cell}: a step of {step * 1e3:.1f} ms; of the floor, by cores that read: {each}"


def equality_lines(
    tallies: dict[tuple[str, float], EqualityTally], judgements: Sequence[Judgement]
) -> Iterable[str]:
    """Lines about the comparison of texts."""
    yield ""
    for (arm, temperature), tally in tallies.items():
        yield f"{arm}, T = {temperature:g}: {tally.equal} of {tally.texts} texts are the reference's"
    ties = [one for one in judgements if one.near_tie]
    if judgements:
        yield f"{len(judgements)} first differences replayed: {len(ties)} near-ties of the target"
    for one in judgements:
        if not one.near_tie:
            at = len(one.difference.prefix)
            yield (
                f"NO NEAR-TIE: prompt {one.difference.prompt}, T = {one.difference.temperature:g}, "
                f"token {at}: "
                f"{one.difference.actual} instead of {one.difference.expected}, {one.distance:.4f} below the "
                f"best where {one.tolerance:.4f} is rounding"
            )
