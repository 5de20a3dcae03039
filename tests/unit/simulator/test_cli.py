"""The command line."""

from __future__ import annotations

import json

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


def test_an_unknown_arm_is_refused(monkeypatch):
    """Before anything runs."""
    monkeypatch.setattr("sys.argv", ["simulator", "run", "--mode", "magic"])
    with pytest.raises(ValueError, match="magic"):
        main()
