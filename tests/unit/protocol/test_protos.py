"""The generated code is that of the protos, and the protos keep the rules of their linter."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """Nobody edits generated code or forgets to run `scripts/generate_protos.py`."""
    runpy.run_path(str(ROOT / "scripts" / "generate_protos.py"))["generate"](tmp_path)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert fresh
    for path, text in fresh.items():
        assert (ROOT / path).read_text() == text, f"{path} is stale"


def test_protos_pass_the_linter() -> None:
    """`buf lint` with the rules of protos/buf.yaml, comments included."""
    buf = shutil.which("buf")
    if buf is None:
        pytest.skip("install buf-bin (make install)")
    found = subprocess.run([buf, "lint", str(ROOT / "protos")], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


def breaking(protos: Path) -> subprocess.CompletedProcess[str]:
    """`buf breaking` against the protos that callers of the last release know."""
    buf = shutil.which("buf")
    if buf is None:
        pytest.skip("install buf-bin (make install)")
    command = [buf, "breaking", str(protos), "--against", str(ROOT / "protos" / "released.binpb")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_protos_keep_what_was_released() -> None:
    """Fields, numbers, types and names: generated code of the last release goes on to work."""
    found = breaking(ROOT / "protos")
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("string task = 7;", ""),
        ("string task = 7;", "string task = 9;"),
        ("string task = 7;", "bytes task = 7;"),
        ("rpc ListModels(", "rpc ListAll("),
    ],
)
def test_a_break_is_found(tmp_path: Path, old: str, new: str) -> None:
    """The test above can fail."""
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos)
    path = protos / "outrider/v1/generation.proto"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert breaking(protos).returncode != 0
