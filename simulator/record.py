"""Records a draft's guesses for a target's texts: `python -m simulator record`.

The target generates; at each position the draft ranks its candidates. The record has the target's tokens, the
place of each among the draft's candidates, and how sure the draft was of each candidate. The scheduling code
never learns more of a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.engine.loading.tokenizer_files import load_tokenizer
from simulator.pair.models import ModelChoice
from simulator.pair.ranks import rank_texts
from simulator.pair.target_times import kv_tokens
from simulator.pair.texts import write_texts
from simulator.traces import encode

PROMPTS = (
    "def read_lines(path):\n    with open(path) as stream:\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "def main(argv=None):\n    parser = argparse.ArgumentParser(",
    "    for name, value in sorted(self.headers.items()):\n",
    "try:\n    import ssl\nexcept ImportError:\n    ssl = None\n\n\nclass HTTPConnection:\n",
    "def _parse_header(line):\n    key, _, value = line.partition(':')\n",
    "class Lock:\n    def acquire(self, blocking=True, timeout=-1):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "import os\nimport sys\n\ndef walk(top, topdown=True):\n",
    "    while True:\n        data = self._sock.recv(",
    "def dumps(obj, *, indent=None):\n    if isinstance(obj, dict):\n",
)
"""Beginnings of Python files, the kind of text that the demo pair was trained on."""


def record(target: Path, draft: Path, temperatures: Sequence[float], tokens: int, out: Path) -> None:
    """Write the traces of all prompts at each temperature to `out`; both models run in float32."""
    files = load_tokenizer(str(target))
    assert files is not None, f"{target} has no tokenizer.json"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    room = kv_tokens(0, max(map(len, prompts)) + tokens)
    large, small = (ModelChoice(str(model), "float32").load(room) for model in (target, draft))
    traces = {}
    for temperature in temperatures:
        texts = write_texts(large, prompts, temperature, tokens)
        traces[str(temperature)] = [encode(trace) for trace in rank_texts(small, texts)]
    document = {"vocabulary_size": large.loaded.vocabulary_size, "traces": traces}
    out.write_text(json.dumps(document, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"') + "\n")
