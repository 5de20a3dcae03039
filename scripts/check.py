"""Lint, types, and the unit tests of what changed: under a minute, for use while working.

    make check                              changes that are not committed, or else the last commit
    .venv/bin/python -m scripts.check --since main

The tests of a file are those that import it, and those named after it. Those of the architecture always run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from scripts.child import ROOT
from scripts.console import new_parser

ARCHITECTURE = Path("tests/unit/test_architecture.py")
UNIT = Path("tests/unit")


def main() -> int:
    """Run the checks one after the other, the quick ones first; stop at the first that fails."""
    parser = new_parser(__doc__)
    parser.add_argument("--since", help="a commit; by default HEAD, or the one before if nothing has changed")
    changed = changed_files(parser.parse_args().since)
    tests = sorted({ARCHITECTURE, *tests_of(changed)})
    print(f"{len(changed)} changed files, {len(tests)} test files")
    pytest = ["pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu"]
    commands = [["ruff", "check", "."], ["ruff", "format", "--check", "-q", "."], ["mypy"]]
    for command in [*commands, [*pytest, *map(str, tests)]]:
        started = time.monotonic()
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode:
            return 1
        print(f"{command[0]}: {time.monotonic() - started:.0f} s")
    return 0


def changed_files(since: str | None) -> list[Path]:
    """Existing files that differ from a commit, new ones included, relative to the root."""
    new = _git("ls-files", "--others", "--exclude-standard")
    changed = _git("diff", "--name-only", since or "HEAD")
    if since is None and not changed and not new:
        changed = _git("diff", "--name-only", "HEAD~1")
    return sorted({Path(name) for name in (*new, *changed) if (ROOT / name).exists()})


def tests_of(changed: Iterable[Path]) -> set[Path]:
    """The unit tests of some files, relative to the root."""
    sources = [path for path in changed if path.suffix == ".py"]
    found = {path for path in sources if path.is_relative_to(UNIT) and path.name.startswith("test_")}
    modules = [".".join(path.with_suffix("").parts) for path in sources if "tests" not in path.parts]
    names = {f"test_{path.name}" for path in sources}
    for test in (ROOT / UNIT).rglob("test_*.py"):
        text = test.read_text(encoding="utf-8")
        if test.name in names or any(f"from {module} import" in text for module in modules):
            found.add(test.relative_to(ROOT))
    return found


def _git(*arguments: str) -> list[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
