"""What the study of steering constants changes."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.protocol.errors import ConfigError
from simulator.sensitivity import STEERING, Constant, constants, run


@pytest.mark.parametrize(
    ("value", "half", "double"), [(4.0, 2.0, 8.0), (1.0, 1.0, 2.0), (0.15, 0.075, 0.3), (0.95, 0.975, 0.9)]
)
def test_a_constant_is_halved_and_doubled(value: float, half: float, double: float) -> None:
    """A whole one stays whole, and a share near 1 keeps below 1."""
    constant = Constant("module", "NAME", value)
    assert constant.changed(0.5) == pytest.approx(half)
    assert constant.changed(2.0) == pytest.approx(double)


def test_there_are_few_constants() -> None:
    """Thirty at most, with the values of their modules."""
    found = {constant.name: constant.value for constant in constants()}
    assert found["BLOCK_GAP"] == 0.15
    assert 20 < len(constants()) <= 30


def test_an_unknown_constant_is_refused() -> None:
    """Before anything is simulated, which takes minutes."""
    with pytest.raises(ConfigError, match="NOPE: no such constant"):
        next(run(["YIELD", "NOPE"]))


@pytest.mark.parametrize("module", STEERING)
def test_every_constant_is_explained(module: str) -> None:
    """A docstring follows it, or the assignments after it: what it means, and where its value comes from."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    told: set[str] = set()
    group: list[str] = []
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign):
            group.append(ast.unparse(node.targets[0]))
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told |= set(group)
        group = []
    assert set(STEERING[module]) <= told


def test_defaults_taken_from_a_constant_change_too() -> None:
    """A process of its own imports the changed source; an unknown name is an error."""
    code = (
        "from simulator.sensitivity import _change\n"
        "_change('verify_service.speculation.drafting', 'FIRST_DRAFTS', '7')\n"
        "from verify_service.speculation.drafting import _Standing\n"
        "print(_Standing().max_drafts)\n"
        "_change('verify_service.speculation.drafting', 'NOTHING', '7')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "7\n"
    assert "assigns no NOTHING" in done.stderr
