"""How the host's work for one step grows with the context: planning it, and what its tokens see.

python -m benchmarks.context

Processor time of one thread, without a model: the least of some tries.
"""

from __future__ import annotations

import time

import torch

from benchmarks import machine
from benchmarks.flags import new_parser
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.step import Segment, pack_step
from scripts.console import run

PAGE = 16
KINDS = {"one token": 1, "a tree of 32": 32, "a chunk of 512": 512}
TRIES = 20
QUERIES_PER_KV = 4


def main() -> int:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 32_000])
    lengths = parser.parse_args().lengths
    print(machine.lines(machine.describe()))
    print(f"\n{'host time, us':16}" + "".join(f"{length:>10}" for length in lengths))
    for kind, count in KINDS.items():
        print(f"{kind:16}" + "".join(f"{micros(count, length):10.0f}" for length in lengths))
    return 0


def micros(count: int, length: int) -> float:
    """Processor time of planning `count` tokens behind `length`, in microseconds."""
    segment = segment_of(count, length)

    def plan() -> float:
        start = time.thread_time()
        step = pack_step(
            [segment], queries_per_kv=QUERIES_PER_KV, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        step.plain_view(step.groups[0], None)
        return time.thread_time() - start

    return min(plan() for _ in range(TRIES)) * 1e6


def segment_of(count: int, length: int) -> Segment:
    """New tokens behind committed ones: a binary tree of 32, else a chain."""
    kv = SequenceKv.open(PagePool((length + count) // PAGE + 2, PAGE), [], reuse=False)
    kv.reserve(length)
    kv.append([0] * length, None)
    kv.commit(range(length), [0] * length)
    parents = [-1 if node < 2 else node // 2 - 1 for node in range(count)] if count == 32 else None
    kv.reserve(count)
    kv.append([0] * count, parents)
    return Segment(kv, [0] * count, parents, [count - 1])


if __name__ == "__main__":
    run(main)
