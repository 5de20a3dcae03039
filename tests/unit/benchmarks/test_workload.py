"""Which turns a grid has, and the prompts that come with the benchmark."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.workload import Cell, joined, load_workload, turns
from scripts.local_services import TARGET

SMALL, LARGE = Cell(0.0, 1, 0.0), Cell(0.0, 8, 0.0)


def test_turns_of_all_cells_are_interleaved() -> None:
    """Each cell gets its first turn before any gets its second; large batches need fewer turns."""
    order = [(turn.cell, turn.index) for turn in turns([SMALL, LARGE], requests=3, min_turns=2, prompts=12)]
    assert order == [(SMALL, 0), (LARGE, 0), (SMALL, 1), (LARGE, 1), (SMALL, 2)]


def test_prompts_go_round() -> None:
    """Turn by turn the next prompts are taken, the first again after the last."""
    plan = list(turns([LARGE], requests=16, min_turns=1, prompts=12))
    assert plan[0].prompts == tuple(range(8))
    assert plan[1].prompts == (8, 9, 10, 11, 0, 1, 2, 3)


def test_clients_may_send_several_requests_in_a_row() -> None:
    """A turn then has so many requests for each place, and the cell as many requests as before."""
    plan = list(turns([LARGE], requests=32, min_turns=1, prompts=48, in_a_row=2))
    assert [turn.prompts for turn in plan] == [tuple(range(16)), tuple(range(16, 32))]


def test_the_prompts_of_the_benchmark_fill_their_length() -> None:
    """Twelve different texts of at least 128 tokens each, cut to the length that was asked for."""
    work = load_workload(Namespace(prompts=None, prompt_tokens=128, tokens=16, joined=False), TARGET)
    assert [len(prompt) for prompt in work.prompts] == [128] * 12
    assert len(set(work.prompts)) == 12


def test_prompts_may_come_from_a_file(tmp_path) -> None:
    """Texts are encoded with the target's tokenizer, lists of ids are taken as they are."""
    path = tmp_path / "prompts.json"
    path.write_text('["import os", [5, 6, 7]]')
    work = load_workload(Namespace(prompts=str(path), prompt_tokens=2, tokens=16, joined=False), TARGET)
    assert len(work.prompts[0]) == 2
    assert work.prompts[1] == (5, 6)


def test_short_prompts_are_joined_to_long_ones() -> None:
    """A prompt goes on with those after it, and after the last with the first."""
    assert joined([(1, 2), (3,), (4,)], 5) == [(1, 2, 3, 4, 1), (3, 4, 1, 2, 3), (4, 1, 2, 3, 4)]
