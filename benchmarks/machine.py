"""Describes the machine and the software that figures were measured with."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.metadata import version

from outrider.cli.bench import machine
from scripts.child import ROOT

PACKAGES = ("torch", "transformers", "grpcio")


def describe() -> dict[str, str]:
    """Machine, versions and date."""
    return {**machine.describe(), "commit": _commit(), **{name: version(name) for name in PACKAGES}}


def lines(about: Mapping[str, str]) -> str:
    """A line per fact."""
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
