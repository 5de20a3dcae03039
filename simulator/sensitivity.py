"""Measures how much each constant that steers speculation matters: `python -m simulator sensitivity`.

Each constant is halved and doubled. For shares near 1, their distance from 1 is halved and doubled instead. A
process of its own runs the loads with the changed source, so that defaults taken from a constant change too.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean

from outrider.protocol.errors import ConfigError

STEERING: Mapping[str, tuple[str, ...]] = {
    "verify_service.speculation.drafting": (
        *("FIRST_DRAFTS", "WINDOW_ROUNDS", "CLEAR", "MIN_STEPS"),
        *("PROBE_EVERY", "MAX_LOSS", "MAX_REST"),
    ),
    "verify_service.scheduler": ("MIN_STRETCH",),
    "verify_service.speculation.cost_model": ("OWN_WEIGHT", "OTHERS_WEIGHT", "RETRY", "LARGEST_RATIO"),
    "verify_service.speculation.pace": ("LATE_WEIGHT",),
    "verify_service.speculation.patience": ("SPREAD", "MAX_PATIENCE"),
    "verify_service.speculation.several_drafts": ("TRUST_DECAY", "TRUST_PRIOR", "MAX_SILENCE"),
    "draft_service.scheduler": ("YIELD",),
    "draft_service.drafters.text": ("SHORTEST_MATCH",),
    "draft_service.session": ("FULL_PRICE_SESSIONS", "MIN_REACH"),
    "draft_service.outbound": ("BLOCK_GAP",),
    "outrider.speculation.decayed": ("WEIGHT",),
    "outrider.speculation.acceptance": ("FLATNESS", "DECAY", "PRIOR_WEIGHT", "SHARED_WEIGHT", "HEAD_START"),
    "orchestrator.session": ("PARK_SECONDS",),
}
"""The constants by module, thirty at most. Their docstrings give unit, meaning and source."""
LOADS = (
    ("widened", 1, 0.0),
    ("widened", 1, 1.0),
    ("widened", 8, 0.0),
    ("widened", 8, 1.0),
    ("widened", 32, 0.7),
    ("h100-8b-1b", 1, 0.7),
    ("h100-8b-1b", 32, 0.7),
)
"""The loads: profile, sessions and temperature."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that steers speculation."""

    module: str
    name: str
    value: float

    def changed(self, factor: float) -> float:
        """The value times a factor; for a value between 0.5 and 1, its distance from 1 is multiplied instead.

        An integer stays an integer.
        """
        if 0.5 < self.value < 1.0:
            return 1.0 - (1.0 - self.value) * factor
        changed = self.value * factor
        return max(round(changed), 1) if self.value == int(self.value) >= 1 else changed


def constants() -> list[Constant]:
    """All constants of `STEERING`, with their values."""
    return [
        Constant(module, name, float(getattr(import_module(module), name)))
        for module, names in STEERING.items()
        for name in names
    ]


def run(names: Sequence[str]) -> Iterator[str]:
    """A line per changed constant: least, mean and largest ratio of the speed to that without a change.

    Raises:
        ConfigError: a name is none of a constant.
    """
    chosen = [constant for constant in constants() if not names or constant.name in names]
    if unknown := set(names) - {constant.name for constant in chosen}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such constant; simulator/sensitivity.py has all")
    yield "constant                          changed      least   mean  largest  of the loads"
    base = _speeds([])
    for constant in chosen:
        for factor in (0.5, 2.0):
            changed = constant.changed(factor)
            speeds = _speeds([constant.module, constant.name, _written(constant, changed)])
            ratios = [speed / before for speed, before in zip(speeds, base, strict=True)]
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            yield (
                f"{constant.name:<24}{constant.value:>9g} -> {changed:<9g}"
                f"{min(ratios):>6.2f} {geometric_mean(ratios):>6.3f} {max(ratios):>6.2f}   {shown}"
            )


def _written(constant: Constant, changed: float) -> str:
    whole = changed == int(changed) and constant.value == int(constant.value)
    return str(int(changed)) if whole else repr(changed)


def _speeds(change: Sequence[str]) -> list[float]:
    command = [sys.executable, "-m", "simulator.sensitivity", *change]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def _change(module: str, name: str, value: str) -> None:
    """Import a module with another value of one of its constants.

    Raises:
        ValueError: the module assigns no such constant.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}")
    tree = ast.parse(Path(spec.origin).read_text())
    found = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    if not found:
        raise ValueError(f"{module} assigns no {name}")
    found[0].value = ast.copy_location(ast.Constant(ast.literal_eval(value)), found[0].value)
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    exec(compile(tree, spec.origin, "exec"), made.__dict__)


def _measure() -> None:
    """Print the tokens per second of all loads; imports the code that was changed."""
    from simulator.cli import find_profile
    from simulator.simulate import simulate
    from simulator.topology import Load, Topology

    for name, sessions, temperature in LOADS:
        load = Load(sessions=sessions, rounds=4 if sessions == 1 else 2, temperature=temperature)
        print(simulate(find_profile(name), Topology(), load).tokens_per_second, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _change(*sys.argv[1:])
    _measure()
