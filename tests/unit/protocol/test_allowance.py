"""Room for blocks between two verdicts."""

from __future__ import annotations

from outrider.protocol.allowance import BLOCKS, LATE, NODES, Allowance


def test_blocks_and_nodes_run_out_each() -> None:
    """Small blocks by their number, large ones by their nodes; what does not fit takes nothing."""
    small, large = Allowance(), Allowance()
    assert [small.spend(1) for _ in range(BLOCKS + 1)] == [True] * BLOCKS + [False]
    assert [large.spend(NODES), large.spend(1), large.spend(0)] == [True, False, True]


def test_a_verdict_gives_room_and_little_is_saved_up() -> None:
    """However many verdicts passed in silence, only that of a few may be used at once."""
    allowance = Allowance()
    for _ in range(100):
        allowance.refill()
    assert allowance == Allowance.full() == Allowance(LATE * BLOCKS, LATE * NODES)
