"""Counts how often a token's result depends on its batch.

    python -m benchmarks.determinism --model DIR --dtype bfloat16

The model decodes some prompts greedily token by token, then again with candidates and all at once; candidates
are the text decoded before, partly spoilt.

    rows     of logits that are equal, in every bit, to those computed token by token; up to the first token
             that differs
    texts    that differ
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.workload import add_flags, load_workload
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.check_determinism import library_part
from outrider.engine.loading.loader import load_model
from outrider.engine.make_runner import make_runner
from outrider.engine.runner import ModelRunner, Segment
from scripts.console import new_parser, run

NODES = 6
"""Depth of the candidates of a step."""
SPOILT = 0.2
"""Share of the candidates in chains that are wrong; in trees every candidate has a wrong sibling."""
ALONE, CHAINS, TREES, TOGETHER = "one by one", "chains", "trees", "trees, all at once"
Tokens = Sequence[int]


@dataclass(slots=True)
class Decoding:
    """One text as it grows."""

    kv: SequenceKv
    last: int
    text: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """[V] logits that chose each token of the text."""


def main() -> int:
    """Load the model and print what differs."""
    flags = _flags()
    prompts = load_workload(flags, flags.model).prompts[: flags.requests]
    runner = _runner(flags, prompts)
    library = library_part(runner.loaded)
    print(f"{flags.model.name} {flags.dtype}; computed by the library: {library or 'nothing'}\n")
    print(f"{'':20} {'equal rows':>12} {'other texts':>12}")
    for way, (rows, texts) in compare(runner, prompts, flags.tokens).items():
        print(f"{way:20} {rows:12.1%} {f'{texts} of {len(prompts)}':>12}")
    return 0


def compare(runner: ModelRunner, prompts: Sequence[Tokens], count: int) -> dict[str, tuple[float, int]]:
    """Return, for each way of decoding, the share of equal rows, and how many texts differ."""
    alone = [decode(runner, [prompt], count)[0] for prompt in prompts]
    texts = [decoding.text for decoding in alone]
    pairs = list(zip(prompts, texts, strict=True))
    ways = {
        CHAINS: [decode(runner, [prompt], count, [text], CHAINS)[0] for prompt, text in pairs],
        TREES: [decode(runner, [prompt], count, [text], TREES)[0] for prompt, text in pairs],
        TOGETHER: decode(runner, prompts, count, texts, TREES),
    }
    return {way: _judge(alone, decodings) for way, decodings in ways.items()}


def decode(
    runner: ModelRunner,
    prompts: Sequence[Tokens],
    count: int,
    drafts: Sequence[Tokens] = (),
    way: str = ALONE,
) -> list[Decoding]:
    """Greedy texts of all prompts at once, with candidates from `drafts`."""
    generator = random.Random(1)
    decodings = [_prefilled(runner, prompt) for prompt in prompts]
    while running := [i for i, decoding in enumerate(decodings) if len(decoding.text) < count]:
        segments = [
            _segment(decodings[i], drafts[i][len(decodings[i].text) :] if drafts else (), way, generator)
            for i in running
        ]
        logits = runner.forward(segments)
        parts = torch.split(logits, [len(segment.tokens) for segment in segments])
        for i, segment, part in zip(running, segments, parts, strict=True):
            _advance(runner, decodings[i], segment, part)
    for decoding in decodings:
        decoding.kv.release()
        del decoding.text[count:], decoding.rows[count:]
    return decodings


def _prefilled(runner: ModelRunner, prompt: Tokens) -> Decoding:
    kv = SequenceKv.open(runner.pool, [])
    chunk = prompt[:-1]
    runner.forward([Segment(kv, chunk, None, [])])
    runner.commit(kv, range(len(chunk)), chunk)
    return Decoding(kv, prompt[-1])


def _segment(decoding: Decoding, draft: Tokens, way: str, generator: random.Random) -> Segment:
    """The last token and its candidates."""
    tokens, parents, above = [decoding.last], [-1], 0
    for token in draft[:NODES]:
        if way == TREES:
            tokens.append(token // 2)
            parents.append(above)
        spoilt = way == CHAINS and generator.random() < SPOILT
        tokens.append(token // 2 if spoilt else token)
        parents.append(above)
        above = len(tokens) - 1
    return Segment(decoding.kv, tokens, parents, range(len(tokens)))


def _advance(runner: ModelRunner, decoding: Decoding, segment: Segment, logits: torch.Tensor) -> None:
    """Walk down while a candidate is the greedy choice, and commit; logits [tokens, V]."""
    assert segment.parents is not None
    choices, path = logits.argmax(-1).tolist(), [0]
    for offset in range(1, len(choices)):
        if segment.parents[offset] == path[-1] and segment.tokens[offset] == choices[path[-1]]:
            path.append(offset)
    runner.commit(decoding.kv, path, [segment.tokens[offset] for offset in path])
    decoding.text += [choices[offset] for offset in path]
    decoding.rows += [logits[offset] for offset in path]
    decoding.last = decoding.text[-1]


def _judge(expected: Sequence[Decoding], found: Sequence[Decoding]) -> tuple[float, int]:
    equal: list[bool] = []
    for one, other in zip(expected, found, strict=True):
        pairs = zip(one.text, other.text, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.text) - 1) + 1
        equal += [torch.equal(a, b) for a, b in zip(one.rows[:same], other.rows[:same], strict=True)]
    changed = sum(one.text != other.text for one, other in zip(expected, found, strict=True))
    return sum(equal) / len(equal), changed


def _runner(flags: argparse.Namespace, prompts: Sequence[Tokens]) -> ModelRunner:
    loaded = load_model(
        str(flags.model), dtype=flags.dtype, device=flags.device, threads=1, deterministic=flags.deterministic
    )
    longest = max(len(prompt) for prompt in prompts) + flags.tokens + 4 * NODES
    return make_runner(loaded, (len(prompts) + 1) * -(-longest // PAGE_SIZE), PAGE_SIZE)


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and weights")
    parser.add_argument("--dtype", default="bfloat16", help="arithmetic of the weights")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--deterministic", action="store_true", help="with kernels that a GPU has for it")
    parser.add_argument("--requests", type=int, default=8, help="prompts that are decoded")
    add_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
