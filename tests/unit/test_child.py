"""Child processes that speak JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.child import Child, ChildError

ECHO = """
import sys
print("not for anybody")
print("{not for anybody}")
print("3")
print('{"event": "ready"}', flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def python(program: str, folder: Path) -> Child:
    """A process that runs a program."""
    return Child([sys.executable, "-c", program], folder / "log")


def test_a_child_answers_in_json_lines(tmp_path):
    """Other output is passed over, and the end of the block ends the process."""
    with python(ECHO, tmp_path) as child:
        assert child.receive(30.0) == {"event": "ready"}
        assert child.ask({"question": 1}, 30.0) == {"question": 1}
        assert child.running
    assert not child.running


def test_a_child_that_ends_is_reported_with_its_log(tmp_path):
    """The last words of a process that failed are part of the error."""
    with (
        python("import sys; sys.exit('no such model')", tmp_path) as child,
        pytest.raises(ChildError, match=r"(?s)ended with 1.*no such model"),
    ):
        child.receive(30.0)


def test_a_silent_child_is_reported(tmp_path):
    """Waiting has an end."""
    with (
        python("import time; time.sleep(60)", tmp_path) as child,
        pytest.raises(ChildError, match="no answer"),
    ):
        child.receive(0.05)
