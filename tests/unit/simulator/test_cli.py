"""The command line."""

from __future__ import annotations

import json
import re

import pytest

from simulator.cli import main


def test_run_prints_a_line_per_case_and_writes_them(make_profile, tmp_path, monkeypatch, capsys):
    """Every combination of what is listed, with the profile's origin above."""
    profile, out = tmp_path / "mine.json", tmp_path / "out.json"
    profile.write_text(make_profile().model_dump_json())
    flags = f"run --profile {profile} --mode auto,off --sessions 1,2 --new-tokens 5 --prompt-tokens 8"
    monkeypatch.setattr("sys.argv", ["simulator", *flags.split(), "--json", str(out)])
    main()
    assert "known (modelled)" in capsys.readouterr().out
    cases = [(row["sessions"], row["arm"]) for row in json.loads(out.read_text())]
    assert cases == [(1, "auto"), (1, "off"), (2, "auto"), (2, "off")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mode magic", "argument --mode: .* 'magic'"),
        ("--sessions 0", "sessions, rounds, new tokens, verify replicas and orchestrators must each be 1"),
        ("--rounds 0", "must each be 1 or more"),
        ("--verify 0", "must each be 1 or more"),
        ("--new-tokens -3", "must each be 1 or more"),
        ("--draft -1", "draft replicas, round trips and prompt tokens must each be 0 or more"),
        ("--rtt-ms -1", "must each be 0 or more"),
        ("--prompt-tokens -1", "must each be 0 or more"),
        ("--orchestrators 0", "must each be 1 or more"),
        ("--prompt-tokens 2000", "a prompt of 2000 tokens and 128 new ones are more than .*; ask for less"),
        ("--temperature 0.3", "no texts of temperature 0.3; use one of 0.0, 0.7, 1.0"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(monkeypatch, capsys, flags, said):
    """It says what to change."""
    monkeypatch.setattr("sys.argv", ["simulator", "run", "--sessions", "1", *flags.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert re.search(said, f"{end.value.code} {capsys.readouterr().err}")
