"""Is the overlap real? Target idle share and speed of the pipeline at batch 1, on the widened demo pair.

    python -m benchmarks.overlap --out out/overlap.json

The target is widened to 216 M parameters in bfloat16, one thread per service, each model on a core of its
own. All modes run on the same prompts in turn; figures are medians over requests.

    idle share   1 - (forwards + sampling) / (end of the last step - end of the prefill); 1 - idle share is
                 the pipeline efficiency, target step time / mean period of a round
    overlap      share of the target's working time during which the draft worked too
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2
from scripts.local_services import ROOT, services, widened_target

MODES = {"off": "MODE_OFF", "sequential": "MODE_SEQUENTIAL", "auto": "MODE_AUTO"}
PROMPTS = (
    "def read_lines(path):\n    with open(path) as stream:\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "def main(argv=None):\n    parser = argparse.ArgumentParser(",
    "    for name, value in sorted(self.headers.items()):\n",
    "try:\n    import ssl\nexcept ImportError:\n    ssl = None\n\n\nclass HTTPConnection:\n",
)
Interval = tuple[int, int]
"""Start and end in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    mode: str
    temperature: float
    tokens: tuple[int, ...]
    decode_tokens_per_second: float
    acceptance_length: float
    hit_rate: float
    idle_share: float
    overlap: float


def run(stub: generation_pb2_grpc.GenerationServiceStub, flags: argparse.Namespace) -> list[Sample]:
    """Every prompt in every mode and temperature, interleaved, after one round to warm up."""
    for mode in MODES:
        one_request(stub, mode, PROMPTS[0], 0.0, flags.tokens)
    return [
        one_request(stub, mode, prompt, temperature, flags.tokens)
        for _ in range(flags.rounds)
        for prompt in PROMPTS[: flags.prompts]
        for temperature in flags.temperatures
        for mode in MODES
    ]


def one_request(
    stub: generation_pb2_grpc.GenerationServiceStub, mode: str, prompt: str, temperature: float, count: int
) -> Sample:
    """Generate, and judge by the statistics and the timeline of the answer."""
    message = generation_pb2.GenerateRequest(
        text=prompt,
        sampling=tokens_pb2.SamplingParams(
            max_tokens=count, temperature=temperature, seed=1, ignore_eos=True
        ),
        speculation=generation_pb2.SpeculationParams(mode=MODES[mode]),
        record_timeline=True,
    )
    tokens: list[int] = []
    complete = generation_pb2.Complete()
    for response in stub.Generate(message):
        tokens += response.chunk.token_ids
        complete.MergeFrom(response.complete)
    return judge(mode, temperature, tokens, complete)


def judge(mode: str, temperature: float, tokens: list[int], complete: generation_pb2.Complete) -> Sample:
    """The figures of one request; the first verify bars are the prefill and are left out."""
    statistics = complete.speculation
    prefill, *steps = bars(complete.timeline, "LANE_VERIFY")
    decode_ns = steps[-1][1] - prefill[1]
    working_ns = length(steps)
    return Sample(
        mode=mode,
        temperature=temperature,
        tokens=tuple(tokens),
        decode_tokens_per_second=(len(tokens) - 1) * 1e9 / decode_ns,
        acceptance_length=statistics.acceptance_length,
        hit_rate=statistics.hits / statistics.steps,
        idle_share=1 - working_ns / decode_ns,
        overlap=length(intersect(steps, bars(complete.timeline, "LANE_DRAFT"))) / working_ns,
    )


def bars(timeline: Iterable[generation_pb2.TimelineEvent], lane: str) -> list[Interval]:
    """The bars of a lane in order, those that touch or overlap joined."""
    wanted = generation_pb2.TimelineEvent.Lane.Value(lane)
    found: list[Interval] = []
    for event in sorted(timeline, key=lambda event: event.start_unix_nano):
        if event.lane != wanted:
            continue
        start, end = event.start_unix_nano, event.start_unix_nano + 1000 * event.duration_micros
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Total of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where both run."""
    overlaps = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in overlaps if start < end]


def summarise(samples: Sequence[Sample]) -> list[dict[str, float | str]]:
    """Medians by temperature and mode, with the speed relative to the target alone."""
    rows: list[dict[str, float | str]] = []
    for temperature in sorted({sample.temperature for sample in samples}):
        here = [sample for sample in samples if sample.temperature == temperature]
        base = middle([sample for sample in here if sample.mode == "off"], "decode_tokens_per_second")
        for mode in MODES:
            chosen = [sample for sample in here if sample.mode == mode]
            figures = {name: middle(chosen, name) for name in FIGURES}
            ratio = figures["decode_tokens_per_second"] / base
            rows.append({"temperature": temperature, "mode": mode, "ratio": ratio, **figures})
    return rows


FIGURES = ("decode_tokens_per_second", "acceptance_length", "hit_rate", "idle_share", "overlap")


def middle(samples: Sequence[Sample], name: str) -> float:
    """Median of one figure."""
    return median(getattr(sample, name) for sample in samples)


def print_table(rows: Sequence[dict[str, float | str]]) -> None:
    """One line per temperature and mode."""
    print(
        f"{'T':>4} {'mode':11}{'tokens/s':>10}{'ratio':>7}{'length':>8}{'hits':>6}{'idle':>7}{'overlap':>9}"
    )
    for row in rows:
        print(
            "{temperature:4} {mode:11}{decode_tokens_per_second:10.1f}{ratio:7.2f}{acceptance_length:8.2f}"
            "{hit_rate:6.0%}{idle_share:7.1%}{overlap:9.0%}".format(**row)
        )


def check(samples: Sequence[Sample]) -> None:
    """A silent draft would make every figure meaningless: some of its nodes must have been accepted."""
    speculative = [sample for sample in samples if sample.mode != "off"]
    if max(sample.acceptance_length for sample in speculative) <= 1.0:
        raise SystemExit("No drafted token was accepted; the figures say nothing.")


def main() -> None:
    """Start the services, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many prompts")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is repeated")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=ROOT / "out/overlap.json")
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    with services(widened_target(), flags.dtype, flags.out.with_suffix(".log")) as endpoint:
        samples = run(generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(endpoint)), flags)
    check(samples)
    rows = summarise(samples)
    print_table(rows)
    result = {"medians": rows, "samples": [asdict(sample) for sample in samples]}
    flags.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
