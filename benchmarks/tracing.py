"""What tracing costs: requests that are not sampled, sampled, and left to a sampler of 1 %, in turn.

    python -m benchmarks.tracing

One client, one set of services that export to a collector on this machine; whether a request is traced says
its own `traceparent`, so that the arms differ in nothing else. Wall time is what tracing costs callers; the
processor time of each process, export included, is what it costs the machine. What the parts cost is measured
first and says what to expect.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from secrets import token_hex
from sys import executable

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import machine, pairs, workload
from benchmarks.flags import command, json_file, new_parser
from benchmarks.layout import layout_of
from benchmarks.pairs import load_pair
from benchmarks.samples import SampledRequest as Sample
from benchmarks.samples import Spread, decode_rate, paired_ratio
from benchmarks.workload import SEED, Tokens, Workload, load_workload
from outrider.client import Chunk, Client, Complete
from outrider.telemetry import spans
from outrider.telemetry.otlp import request_of
from scripts.child import ROOT, Child
from scripts.console import progress, run
from scripts.local_services import LocalServices, fleet, metric

DRAFT = "demo"
EXPORT_SECONDS = 0.5
"""Between exports of a process; a turn's spans are out before the next turn begins."""
OFF, ALWAYS, SAMPLER = "off", "100 %", "1 %"
FLAGS = {OFF: "00", ALWAYS: "01", SAMPLER: ""}
"""Sampling flag of an arm's requests; without one the orchestrator's sampler decides."""
SETTINGS = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
    "OTEL_BSP_SCHEDULE_DELAY": str(round(EXPORT_SECONDS * 1000)),
}
PARTS, REPEATS = 300, 15


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """What one arm did with the prompts of one turn."""

    arm: str
    index: int
    samples: tuple[Sample, ...]
    spans: int
    cpu_seconds: Mapping[str, float]
    """By process, the export of the spans included."""

    @property
    def rounds(self) -> int:
        """Target steps after the prefill's."""
        return sum(sample.passes for sample in self.samples)

    @property
    def round_ms(self) -> float:
        """Mean time of one."""
        seconds = sum(sample.arrivals[-1][0] - sample.arrivals[0][0] for sample in self.samples)
        return 1e3 * seconds / self.rounds

    @property
    def rate(self) -> float:
        """Tokens per second of decoding, mean of the requests."""
        return sum(map(decode_rate, self.samples)) / len(self.samples)

    @property
    def cpu_us(self) -> float:
        """Processor time per round of all services."""
        return 1e6 * sum(self.cpu_seconds.values()) / self.rounds


def main() -> int:
    """Predict, measure, print and write."""
    flags = parse()
    pair = load_pair(flags)
    work = load_workload(flags, pair.target)
    parts = measure_parts()
    with (
        collecting(flags.out.with_suffix("")) as collector,
        fleet(layout_of(flags, pair, {DRAFT: pair.draft}, prefix_cache=False)) as services,
        Client(services.endpoint(DRAFT), timeout=600) as client,
    ):
        turns = measure(Stand(services, collector, client, flags.temperature), work, flags)
    report(turns, parts, f"{pair.name}, {pair.dtype}, T = {flags.temperature:g}", flags)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    workload.add_flags(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=20, help="of every arm")
    parser.add_argument("--requests", type=int, default=2, help="of a turn, one after the other")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each service")
    parser.add_argument("--out", type=json_file, default=ROOT / "out/tracing.json")
    return parser.parse_args()


def measure_parts() -> dict[str, float]:
    """Processor time in microseconds of recording one step's span, and of preparing it for export."""
    memory, parent = InMemorySpanExporter(), f"00-{1:032x}-{2:016x}-01"
    spans.use_processor("verify", "verify-0", SimpleSpanProcessor(memory))
    attributes = {f"outrider.step.attribute_{number}": number for number in range(12)}

    def record() -> None:
        memory.clear()
        for step in range(PARTS):
            below = spans.step_traceparent(parent, step)
            spans.record_span("verify.forward", parent=below, start_ns=1, end_ns=2, attributes=attributes)

    def export() -> None:
        request_of(memory.get_finished_spans()).SerializeToString()

    found = {"record": _least(record), "export": _least(export)}
    spans.shutdown_tracing()
    return found


def _least(work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / PARTS


@contextmanager
def collecting(folder: Path) -> Iterator[Child]:
    """A collector, to which processes that are started meanwhile export."""
    folder.mkdir(parents=True, exist_ok=True)
    program = [executable, "-m", "benchmarks.workers.collector"]
    before = dict(os.environ)
    with Child(program, folder / "collector.log") as collector:
        os.environ.update(SETTINGS, OTEL_EXPORTER_OTLP_ENDPOINT=collector.receive()["endpoint"])
        try:
            yield collector
        finally:
            os.environ.clear()
            os.environ.update(before)


class Stand:
    """The services under test, and what is read from them."""

    def __init__(self, services: LocalServices, collector: Child, client: Client, temperature: float) -> None:
        self._services = services
        self._collector = collector
        self._client = client
        self._temperature = temperature

    def turn(self, arm: str, index: int, prompts: Sequence[Tokens], tokens: int) -> TracedTurn:
        """Serve the prompts one after the other, then wait until their spans have been exported."""
        spans_before, cpu_before = self._spans(), self._cpu()
        samples = tuple(self._ask(prompt, tokens, arm) for prompt in prompts)
        time.sleep(2 * EXPORT_SECONDS)
        cpu = {name: seconds - cpu_before[name] for name, seconds in self._cpu().items()}
        return TracedTurn(arm, index, samples, self._spans() - spans_before, cpu)

    def _ask(self, prompt: Tokens, tokens: int, arm: str) -> Sample:
        started, ids, arrivals, passes = time.perf_counter(), list[int](), list[tuple[float, int]](), 0
        for event in self._client.stream(
            prompt,
            traceparent=traceparent_of(arm),
            max_tokens=tokens,
            temperature=self._temperature,
            seed=SEED,
            ignore_eos=True,
        ):
            match event:
                case Chunk(token_ids=new) if new:
                    arrivals.append((time.perf_counter() - started, len(new)))
                    ids += new
                case Complete(speculation=counts):
                    passes = int(counts["steps"]) - 1
                case _:
                    pass
        return Sample(tuple(ids), tuple(arrivals), passes)

    def _spans(self) -> int:
        return int(self._collector.ask({})["spans"])

    def _cpu(self) -> dict[str, float]:
        return {
            name: metric(ready["metrics"], "process_cpu_seconds_total")
            for name, ready in self._services.ready.items()
        }


def measure(stand: Stand, work: Workload, flags: argparse.Namespace) -> list[TracedTurn]:
    """All turns; the arms of a turn serve the same prompts, in an order that is drawn anew every time."""
    order, found = Random(SEED), list[TracedTurn]()
    for arm in FLAGS:
        stand.turn(arm, -1, work.prompts[:1], flags.tokens)
    for index in range(flags.turns):
        first = index * flags.requests
        prompts = [work.prompts[(first + i) % len(work.prompts)] for i in range(flags.requests)]
        for arm in order.sample(list(FLAGS), len(FLAGS)):
            found.append(stand.turn(arm, index, prompts, flags.tokens))
        progress(f"turn {index + 1} of {flags.turns}")
    return found


def report(
    turns: Sequence[TracedTurn], parts: Mapping[str, float], title: str, flags: argparse.Namespace
) -> None:
    """Print the tables and write them."""
    by_arm = {arm: {turn.index: turn for turn in turns if turn.arm == arm} for arm in FLAGS}
    rows = {arm: figures(of, by_arm[OFF]) for arm, of in by_arm.items()}
    about = machine.describe() | {"command": command("tracing"), "setting": title}
    per_round, round_ms = rows[ALWAYS]["spans"].middle, rows[OFF]["round_ms"].middle
    expected = per_round * sum(parts.values())
    print(machine.lines(about))
    print(f"\nA span costs {parts['record']:.1f} us to record and {parts['export']:.1f} us to export.")
    print(
        f"Expected of {per_round:.1f} spans a round: {expected:.0f} us of processor time, "
        f"{expected / (10 * round_ms):.2f} % of a round of {round_ms:.1f} ms; "
        f"not all of it delays the round.\n"
    )
    print("sampled  spans  round ms  tokens/s  ÷ off, quartiles      CPU us   more than off, quartiles")
    for arm, row in rows.items():
        ratio, more = row["against_off"], row["more_cpu_us"]
        print(
            f"{arm:>7}{row['spans'].middle:7.1f}{row['round_ms'].middle:10.2f}{row['rate'].middle:10.1f}"
            f"{ratio.middle:8.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{row['cpu_us'].middle:12.0f}"
            f"{more.middle:8.0f} [{more.low:.0f}, {more.high:.0f}]"
        )
    result = {"about": about, "parts_us": parts, "rows": {arm: _plain(row) for arm, row in rows.items()}}
    flags.out.write_text(json.dumps(result, indent=1) + "\n")


def figures(turns: Mapping[int, TracedTurn], off: Mapping[int, TracedTurn]) -> dict[str, Spread]:
    """An arm's figures over its turns; spans and processor time are per round."""
    ratio = paired_ratio(
        {index: turn.rate for index, turn in turns.items()}, {index: turn.rate for index, turn in off.items()}
    )
    assert ratio is not None
    return {
        "spans": Spread.of([turn.spans / turn.rounds for turn in turns.values()]),
        "round_ms": Spread.of([turn.round_ms for turn in turns.values()]),
        "rate": Spread.of([turn.rate for turn in turns.values()]),
        "against_off": ratio,
        "cpu_us": Spread.of([turn.cpu_us for turn in turns.values()]),
        "more_cpu_us": Spread.of([turn.cpu_us - off[index].cpu_us for index, turn in turns.items()]),
    }


def _plain(row: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    return {name: asdict(spread) for name, spread in row.items()}


def traceparent_of(arm: str) -> str:
    """The trace context of one of an arm's requests."""
    flag = FLAGS[arm]
    return f"00-{token_hex(16)}-{token_hex(8)}-{flag}" if flag else ""


if __name__ == "__main__":
    run(main)
