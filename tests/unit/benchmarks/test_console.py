"""How a benchmark ends."""

from __future__ import annotations

import pytest

from benchmarks.console import run
from scripts.child import ChildError


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
    ],
)
def test_a_benchmark_ends_with_a_status_and_a_sentence(main, status, sentence, capsys):
    """Ctrl-C and a process that failed end it without a traceback."""
    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == status
    assert sentence in capsys.readouterr().err
