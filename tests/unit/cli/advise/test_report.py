"""The tables and the JSON."""

from __future__ import annotations

import json

from outrider.cli.advise.report import as_dict, render
from tests.unit.cli.advise.findings import candidate, findings

FOUND = findings(candidate("small", (100, 300, 420), (1.0, 1.0, 0.1)), candidate("<lookup>", (50, 200, 400)))


def test_the_tables_end_with_what_to_take_and_its_command() -> None:
    """With the load from which on it rests."""
    lines = render(FOUND).splitlines()
    assert lines[-1] == "outrider up --target models/large --draft small --device cpu"
    assert lines[-3].startswith("Take small: 1.47 times")
    assert "From 32 sessions on it rests" in lines[-3]


def test_every_draft_has_its_row_in_every_table() -> None:
    """Sizes and acceptance, acceptance by task, tokens per second."""
    rows = [line.split() for line in render(FOUND).splitlines() if line.startswith("small ")]
    assert rows[0][1:] == ["1.00", "0.050", "10.0", "0.5", "75%", "50%", "25%", "0%", "\N{EN DASH}"]
    assert [row[1:4] for row in rows[1:3]] == [["chat", "1", "75%"], ["code", "1", "75%"]]
    assert rows[3][1:] == ["100", "(2.00)", "300", "(1.50)", "420", "(1.05)", "32"]


def test_without_a_draft_that_pays_none_is_advised() -> None:
    """And the command says so."""
    text = render(findings(candidate("weak", (50, 200, 400))))
    assert "Take none" in text
    assert text.endswith("--draft none --device cpu")


def test_the_json_has_every_figure() -> None:
    """As it was measured."""
    document = json.loads(json.dumps(as_dict(FOUND)))
    assert document["advice"]["draft"] == "small"
    assert document["without_drafts"][0]["tokens_per_second"] == 50.0
    small, other = document["drafts"]
    assert [load["speed_up"] for load in small["loads"]] == [2.0, 1.5, 1.05]
    assert small["acceptance_by_task"]["chat"][0] == 0.75
    assert (small["rests_from"], other["rests_from"]) == (32, None)
