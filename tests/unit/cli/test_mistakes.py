"""What the command line says about mistakes: the flag to change, by its name."""

from __future__ import annotations

import pytest

from outrider.cli.main import main


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
    ],
)
def test_a_mistake_is_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and no name that the caller has not used."""
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"outrider: {said}\n"
