"""How a benchmark takes its flags, and how it ends."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.flags import json_file
from outrider.protocol.errors import ModelError
from scripts.child import ChildError
from scripts.console import run


def raising(error: BaseException):
    """A main function that fails."""

    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "status", "sentence"),
    [
        (lambda: 0, 0, ""),
        (raising(KeyboardInterrupt()), 130, "interrupted"),
        (raising(ChildError("verify.log: no such model")), 1, "no such model"),
        (raising(ModelError("device: 'cuda' is not in this machine")), 1, "not in this machine"),
        (raising(FileNotFoundError(2, "No such file or directory", "out/x.json")), 1, "'out/x.json'"),
    ],
)
def test_a_benchmark_ends_with_a_status_and_a_sentence(main, status, sentence, capsys):
    """Ctrl-C, a process that failed, a model or a file that is not there end it without a traceback."""
    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == status
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("text", ["out", "out/result.txt", ""])
def test_a_result_that_is_no_json_file_is_refused_before_anything_runs(text) -> None:
    """Half an hour of measuring is not lost for a wrong name."""
    with pytest.raises(argparse.ArgumentTypeError, match="json"):
        json_file(text)
    assert json_file("out/result.json") == Path("out/result.json")
