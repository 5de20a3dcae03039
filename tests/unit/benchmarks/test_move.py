"""How `benchmarks.move` starts its replicas."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks import move
from benchmarks.pairs import Pair


def test_both_replicas_are_told_which_kernels_to_use(monkeypatch, tmp_path):
    """Each would otherwise measure for itself, and keys and values do not move between different kernels."""
    commands = []
    monkeypatch.setattr(move, "serve", lambda stack, folder, service, name, *words: commands.append(words))
    monkeypatch.setattr("sys.argv", ["move", "--out", str(tmp_path / "move.json")])
    flags, pair = move.parse(), Pair("tiny", Path("target"), Path("draft"), "float32", "full")
    for name in ("owner", "receiver"):
        move._replica(flags, pair, name, ExitStack())
    backends = [words[words.index("--cpu-backend") + 1] for words in commands]
    assert len(backends) == 2
    assert backends[0] == backends[1] != "auto"
