"""Tables of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.arms.base import OWN, PEER
from benchmarks.equality import Difference, EqualityTally, Judgement
from benchmarks.floor import Floor
from benchmarks.report import equality_lines, floor_lines, rows, tables
from benchmarks.samples import Batch, SampledRequest, Spread
from benchmarks.workload import Cell, Tokens, Turn

CELL = Cell(0.0, 1, 0.0)


@dataclass(frozen=True)
class FakeArm:
    """An arm that was measured elsewhere."""

    name: str
    kind: str
    devices: int
    speculates: bool = False
    engine: str = "none"

    def runs(self, cell: Cell) -> bool:
        """All."""
        return True

    def run(self, cell: Cell, prompts: list[Tokens], tokens: int) -> list[SampledRequest]:
        """Nothing."""
        return []


ARMS = [FakeArm("off", OWN, 1), FakeArm("auto", OWN, 2), FakeArm("slow", PEER, 2), FakeArm("fast", PEER, 2)]


def measured(arm: str, index: int, seconds: float) -> Batch:
    """Ten tokens in so many seconds."""
    request = SampledRequest(tuple(range(10)), ((seconds / 10, 1), (seconds, 9)))
    return Batch(arm, Turn(CELL, index, (0,)), (request,))


def batches() -> list[Batch]:
    """Two turns; in the second the machine was half as fast."""
    seconds = {"off": 1.0, "auto": 0.25, "slow": 2.0, "fast": 0.5}
    return [measured(arm, turn, time * (1 + turn)) for turn in (0, 1) for arm, time in seconds.items()]


def test_ratios_are_against_off_and_the_fastest_peer() -> None:
    """Auto is four times as fast as off and twice as fast as the best peer, whatever the machine did."""
    auto = next(row for row in rows(batches(), ARMS) if row.arm == "auto")
    assert auto.against_off == Spread(4.0, 4.0, 4.0)
    assert auto.against_best_peer == Spread(2.0, 2.0, 2.0)
    assert auto.best_peer == "fast"
    assert auto.figures["tokens_s"] == Spread(25.0, 30.0, 35.0)


def test_a_table_has_a_line_per_arm() -> None:
    """What an arm cannot tell is a dash."""
    lines = tables(rows(batches(), ARMS)).splitlines()
    auto = next(line for line in lines if line.startswith("auto"))
    assert "30.0 [25.0, 35.0]" in auto
    assert auto.split()[-1] == "-"
    assert len({len(line) for line in lines[2:]}) == 1


def test_without_peers_there_is_no_best_one() -> None:
    """Own arms alone are compared with off."""
    own = [batch for batch in batches() if batch.arm in ("off", "auto")]
    assert all(row.against_best_peer is None for row in rows(own, ARMS[:2]))


def test_a_sure_target_is_named() -> None:
    """A difference that rounding does not explain is printed with its place."""
    wrong = Judgement(Difference(3, 0.0, (1, 2), 7, 8), 1.5, 0.1)
    tie = Judgement(Difference(3, 0.0, (1, 2), 7, 8), 0.05, 0.1)
    found = "\n".join(equality_lines({("auto", 0.0): EqualityTally(4, 5)}, [wrong, tie]))
    assert "4 of 5" in found
    assert "2 first differences replayed: 1 near-ties" in found
    assert "NO NEAR-TIE: prompt 3, T = 0, token 2: 8 instead of 7" in found


def test_a_step_without_speculation_stands_beside_its_floor() -> None:
    """At 20 tokens a second a step takes 50 ms; the memory would allow 25, or 12.5 to two cores."""
    found = [row for row in rows(batches(), ARMS) if row.arm == "off"]
    at_20 = [replace(row, figures={"decode_s": Spread(20.0, 20.0, 20.0)}) for row in found]
    lines = list(floor_lines(at_20, Floor(step_bytes=25, bandwidths=(1000.0, 2000.0))))
    assert lines[1].endswith("a step of 50.0 ms; of the floor, by cores that read: 2.00 by 1, 4.00 by 2")
