"""The circle goes on where it was stopped."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks.learning import PATIENCE, Diary, phase_of, prompts
from benchmarks.plot import draw_learning, marks, smoothed


def requests(**counts: int) -> list[dict[str, object]]:
    """So many of each phase."""
    return [
        {"kind": "request", "phase": phase, "steps": 4, "accepted": 3}
        for phase, count in counts.items()
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("done", "happened", "phase"),
    [
        ({}, [], "code"),
        ({"code": 2}, [], "code"),
        ({"code": 3}, [], "turned"),
        ({"code": 3, "turned": 5}, [], "turned"),
        ({"code": 3, "turned": 2}, ["alarm"], "turned"),
        ({"code": 3, "turned": 3}, ["alarm"], "distil"),
        ({"code": 3, "turned": 3 * PATIENCE}, [], "distil"),
        ({"code": 3, "turned": 3}, ["alarm", "distilled"], "canary"),
        ({"code": 3, "turned": 3, "canary": 1}, ["alarm", "distilled", "promoted"], "after"),
        ({"code": 3, "turned": 3, "canary": 3 * PATIENCE}, ["alarm", "distilled"], "after"),
        ({"code": 3, "turned": 3, "after": 3}, ["alarm", "distilled", "promoted"], "done"),
    ],
)
def test_one_phase_follows_another(done, happened, phase):
    """By what has happened alone."""
    assert phase_of([*requests(**done), *({"kind": kind} for kind in happened)], 3) == phase


def test_what_happened_is_read_again(tmp_path: Path):
    """By the next run."""
    diary = Diary(tmp_path / "diary.jsonl")
    diary.add("request", phase="code", steps=2, accepted=1)
    diary.add("alarm")
    again = Diary(tmp_path / "diary.jsonl")
    assert again.events == diary.events
    assert again.has("alarm")
    assert not again.has("promoted")


def test_prompts_are_the_same_in_every_run():
    """And others in every phase, but for texts that stand in several places."""
    first, again = (list(islice(prompts("turned"), 20)) for _ in range(2))
    assert first == again
    assert len(set(first) & set(islice(prompts("after"), 20))) < 5


def test_a_picture_is_drawn(tmp_path: Path):
    """With the phases and what happened between them."""
    events = [*requests(code=3), {"kind": "alarm"}, *requests(turned=2)]
    assert marks(events) == {0: ["code"], 3: ["alarm", "turned"]}
    assert marks([*events, {"kind": "alarm"}, *requests(turned=1)])[5] == ["alarm"]
    draw_learning(events, "Title", tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    assert "<svg" in picture
    assert smoothed(
        [{"steps": 4, "accepted": 2}, {"steps": 4, "accepted": 4}, {"steps": 0, "accepted": 0}]
    ) == [
        0.5,
        0.75,
        0.75,
    ]
