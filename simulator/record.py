"""Records what a draft makes of a target's text: `python -m simulator record`.

The target generates; at each position the draft ranks what it would propose. Kept are the target's tokens,
the place of its token among the draft's candidates, and how sure the draft was of each: all that the
scheduling code ever learns of a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.tokenizer_files import load_tokenizer
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import Ranking, SamplingRow, choose, rank
from outrider.sampling.history import History
from outrider.speculation.acceptance import SharpnessFit
from simulator.traces import CANDIDATES, Trace, encode

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
PAGE_SIZE = 16


def record(target: Path, draft: Path, temperatures: Sequence[float], tokens: int, out: Path) -> None:
    """Write the traces of all prompts at each temperature to `out`."""
    files = load_tokenizer(str(target))
    assert files is not None, f"{target} has no tokenizer.json"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    pair = _Pair(target, draft)
    traces = {
        str(temperature): [encode(trace) for trace in pair.traces(prompts, temperature, tokens)]
        for temperature in temperatures
    }
    document = {"vocabulary_size": pair.vocabulary_size, "traces": traces}
    out.write_text(json.dumps(document, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"') + "\n")


class _Pair:
    """Target and draft in float32."""

    def __init__(self, target: Path, draft: Path) -> None:
        models = [load_model(str(p), dtype="float32", device="cpu", threads=1) for p in (target, draft)]
        self.vocabulary_size = models[0].vocabulary_size
        self._target, self._draft = (ModelRunner(model, 128, PAGE_SIZE) for model in models)

    def traces(self, prompts: Sequence[Sequence[int]], temperature: float, count: int) -> list[Trace]:
        """One trace per prompt, ranked with the sharpness that fits them all."""
        params = [
            SamplingParams(temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(1, len(prompts) + 1)
        ]
        texts = [self._generate(p, c, count) for p, c in zip(prompts, params, strict=True)]
        fit = SharpnessFit()
        for prompt, text, choice in zip(prompts, texts, params, strict=True):
            for ranking, token in zip(self._rank(prompt, text, choice, 1.0), text, strict=True):
                fit.observe(ranking.winners, token)
        return [
            Trace.of(prompt, text, choice.seed, self._rank(prompt, text, choice, fit.value))
            for prompt, text, choice in zip(prompts, texts, params, strict=True)
        ]

    def _generate(self, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
        kv = SequenceKv.open(self._target.pool, prompt, reuse=False)
        history, tokens = History(prompt), [*prompt]
        while len(tokens) < len(prompt) + count:
            fresh = tokens[kv.length :]
            logits = self._target.forward([Segment(kv, fresh, None, [len(fresh) - 1])])
            self._target.commit(kv, range(len(fresh)), fresh)
            tokens += choose(
                logits, [SamplingRow(params, len(tokens), len(tokens) - len(prompt), history)], ()
            )
        kv.release()
        return tokens[len(prompt) :]

    def _rank(
        self, prompt: Sequence[int], text: Sequence[int], params: SamplingParams, sharpness: float
    ) -> list[Ranking]:
        """The draft's ranking at every position of `text`, given all before it."""
        kv = SequenceKv.open(self._draft.pool, prompt, reuse=False)
        tokens = [*prompt, *text[:-1]]
        wanted = range(len(prompt) - 1, len(tokens))
        logits = self._draft.forward([Segment(kv, tokens, None, wanted)])
        kv.release()
        rows = [SamplingRow(params, at + 1, at + 1 - len(prompt), History(prompt)) for at in wanted]
        return rank(logits, rows, CANDIDATES, sharpness, ())
