"""What the command line says about mistakes: the flag to change, by its name."""

from __future__ import annotations

import argparse

import pytest

from outrider.cli.main import main
from outrider.cli.mistakes import in_flags
from outrider.protocol.errors import InvalidRequest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "plan --target /none --draft /none --gpu h100",
            "--target: there is no folder '/none'; give a folder with config.json and weights, or a hub id",
        ),
        (
            "up --draft none lookup",
            "'lookup' is more than outrider up takes; leave it out, or put a flag before it",
        ),
        (
            "generate two words",
            "'words' is more than outrider generate takes; put a text of several words in quotes",
        ),
        ("generate x --token é", "--token: must be printable ASCII"),
        ("--json generate x", "--json is at the wrong place; put it after `outrider generate`"),
        ("generate -- -x --json", "--json is at the wrong place; put it before `--`"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and no name that the caller has not used."""
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"outrider: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "give COMMAND; --help explains it"),
        ("drafts hide", "COMMAND: 'hide' is none of 'list', 'promote', 'demote'"),
        ("up --target", "--target: give it a value"),
        ("top --metrics", "--metrics: give it a value"),
        ("plan --gpu h100", "give --target, --draft; --help explains it"),
        ("distill --target a --draft b --out c", "give --collected or --prompts"),
        ("generate x --max-tokens many", "--max-tokens: must be a whole number, not 'many'"),
        ("generate x --temperature warm", "--temperature: must be a number, not 'warm'"),
        ("generate x --mode fast", "--mode: 'fast' is none of 'auto', 'sequential', 'off'"),
        ("generate x --json=yes", "--json: takes no value; leave 'yes' out"),
        ("generate x --regex a --choice b", "--choice: does not go with --regex; leave one of them out"),
        ("top --interval 0", "--interval: must be a number of seconds above 0, not '0'"),
    ],
)
def test_a_line_that_does_not_parse_is_one_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the usage, whose forty lines would hide it."""
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == f"outrider: {said}\n"


def test_a_refused_label_is_named_by_its_flag() -> None:
    """As the other fields of a request are."""
    error = InvalidRequest("task", "must not have control characters")
    assert in_flags(error, argparse.Namespace()) == "--task: must not have control characters"
