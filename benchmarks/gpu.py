"""Measures the engine on a GPU: one call, under ten minutes on one H100 or H200.

    python -m benchmarks.gpu --out out/gpu.json

An 8B-shaped bf16 target and a 1B-shaped draft with random weights are made on the device; nothing is
downloaded. Every section has a time limit and stands alone: one that fails is printed as FAILED and the
others go on.
`--tiny` tries the script itself on a CPU, through Triton's interpreter (TRITON_INTERPRET=1); its figures mean
nothing.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import linear

from benchmarks.gpu_bench import Bench, captured_ms, one_step
from benchmarks.gpu_flashinfer import flashinfer
from benchmarks.gpu_fp8 import fp8_kv
from benchmarks.gpu_pair import (
    bytes_of_step,
    committed,
    greedy_rows,
    llama,
    loaded_from,
    random_model,
    tree_segment,
)
from benchmarks.gpu_profile import batches, kernels
from outrider.engine.gpu.coded_product import coded_product
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.model_config import find_device
from outrider.engine.quantization.planes import rounded_in_planes
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import rank
from scripts.console import new_parser, run

LAST_START = 480.0
"""Seconds after which no section begins."""


def machine(bench: Bench) -> None:
    """The device and its memory bandwidth: what a copy of 2 GB reads and writes."""
    if bench.device.type == "cuda":
        bench.say("device", torch.cuda.get_device_name(bench.device))
    bench.say("torch, transformers", f"{torch.__version__}, {transformers.__version__}")
    size = 1 << (20 if bench.tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_(0, 255)
    target = torch.empty_like(source)
    milliseconds = bench.device_ms(lambda: target.copy_(source))
    bench.made["bandwidth"] = 2 * size / milliseconds * 1e3
    bench.say("memory bandwidth", f"{bench.made['bandwidth'] / 1e12:.3f} TB/s")


def models(bench: Bench) -> None:
    """Make target and draft; the engine's self check compares its forward with the model's own."""
    for role, shape in (("target", "8b"), ("draft", "1b")):
        network = random_model(llama("tiny" if bench.tiny else shape), bench.device, bench.dtype)
        started = time.monotonic()
        bench.made[role] = loaded_from(network, role)
        bench.say(f"{role}: self check, kernels compiled", f"passed, {time.monotonic() - started:.1f} s")
        started = time.monotonic()
        bench.made[f"{role}_runner"] = bench.runner(bench.made[role], bench.room)
        for entries in (
            bench.made[f"{role}_runner"].attention.keys,
            bench.made[f"{role}_runner"].attention.values,
        ):
            entries.normal_()  # contexts that no step has computed: zeros can run faster than real data
        bench.say(f"{role}: capturing graphs", f"{time.monotonic() - started:.1f} s")


def codes(bench: Bench) -> None:
    """Products with codes, 8B's gate and up, and down: ÷ the reading of their bytes, ÷ torch's with 16 bits.

    In graphs, over copies that no cache holds together.
    """
    for out, width in [(96, 64)] if bench.tiny else [(28672, 4096), (4096, 14336)]:
        plain = [torch.randn(out, width, dtype=bench.dtype, device=bench.device) for _ in range(8)]
        for bits in (8, 4):
            coded = [rounded_in_planes(weight, bits, bench.device) for weight in plain]
            held = sum(weight.words.nbytes + weight.scales.nbytes for weight in coded)
            floor = held / bench.made["bandwidth"] * 1e3
            for rows in (1, 8, 33, 64, 512):
                x = torch.randn(rows, width, dtype=bench.dtype, device=bench.device)
                ours = captured_ms(bench, partial(coded_product, x, bias=None), coded)
                theirs = captured_ms(bench, partial(linear, x), plain)
                what = f"{out} x {width}, {bits} bits, {rows} rows: ÷ floor, ÷ 16 bits"
                bench.say(what, f"{ours / floor:.2f}, {ours / theirs:.2f}")


def steps(bench: Bench) -> None:
    """A plain step against bytes / bandwidth, and steps with nodes against a plain step."""
    loaded, runner = bench.made["target"], bench.made["target_runner"]
    for context in bench.contexts:
        floor = bytes_of_step(loaded, context) / bench.made["bandwidth"] * 1e3
        plain, queued = one_step(bench, runner, context, 0)
        bench.say(f"context {context}: bytes / bandwidth", f"{floor:.3f} ms")
        bench.say(f"context {context}: plain step | queued", f"{plain:.3f} | {queued:.3f} ms")
        bench.say(f"context {context}: plain step x floor", f"{plain / floor:.3f}", "<= 1.25")
        for nodes in (8, 16, 32, 64) if context == 256 else (32,):
            step, queued = one_step(bench, runner, context, nodes)
            bench.say(f"context {context}: {nodes} nodes | queued", f"{step:.3f} | {queued:.3f} ms")
            goal = "<= 1.15" if nodes == 32 else ""
            bench.say(f"context {context}: {nodes} nodes x plain step", f"{step / plain:.3f}", goal)


def draft_steps(bench: Bench) -> None:
    """A draft step: forward of some nodes, ranking, read; greedy and sampled."""
    loaded, runner = bench.made["draft"], bench.made["draft_runner"]
    floor = bytes_of_step(loaded, bench.contexts[0]) / bench.made["bandwidth"] * 1e3
    bench.say("bytes / bandwidth", f"{floor:.3f} ms")
    for nodes, params in (
        (1, SamplingParams()),
        (8, SamplingParams()),
        (8, SamplingParams(temperature=0.7, seed=5)),
    ):
        kv = committed(runner, bench.contexts[0])
        rows = greedy_rows(kv.length, nodes, params)

        def step(kv: SequenceKv = kv, rows: Any = rows, nodes: int = nodes) -> None:
            kv.rollback()
            rank(runner.forward([tree_segment(kv, nodes - 1)]), rows, 8, 1.0, ())

        bench.say(
            f"{nodes} nodes, T = {params.temperature}",
            f"{bench.wall_ms(step):.3f} ms",
            "<= 1 ms" if nodes == 1 else "",
        )
        kv.release()


SECTIONS: tuple[tuple[Callable[[Bench], None], int], ...] = (
    (machine, 40),
    (models, 170),
    (steps, 60),
    (draft_steps, 30),
    (kernels, 30),
    (batches, 40),
    (fp8_kv, 60),
    (flashinfer, 60),
    (codes, 40),
)
"""The sections, the most important first, each with the most seconds that it may take."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Interrupt the `with` block if it takes longer."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run_sections(bench: Bench, wanted: list[str]) -> None:
    """Run every section, whether or not others fail; the figures are on disk after each."""
    for section, seconds in SECTIONS:
        bench.section = section.__name__
        if wanted and bench.section not in [*wanted, "machine", "models"]:
            continue
        try:
            if time.monotonic() - bench.began > LAST_START and not bench.tiny:
                raise TimeoutError("no time left")
            with time_limit(seconds if not bench.tiny else 20 * seconds):
                section(bench)
        except Exception as error:  # time on a GPU is scarce: one broken section must not cost the others
            bench.say("FAILED", f"{type(error).__name__}: {str(error)[:300]}")
        bench.out.parent.mkdir(parents=True, exist_ok=True)
        bench.out.write_text(json.dumps([asdict(line) for line in bench.lines], indent=1))


def main() -> int:
    """Run the sections, print the table again at the end."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=20, help="timed calls per figure")
    parser.add_argument("--sections", nargs="*", default=[], help="only these, beside machine and models")
    parser.add_argument("--tiny", action="store_true", help="try the script on the CPU")
    flags = parser.parse_args()
    device = find_device("cpu" if flags.tiny else flags.device)
    dtype = torch.float32 if flags.tiny else torch.bfloat16
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bench = Bench(device, dtype, flags.tiny, 1 if flags.tiny else flags.runs, flags.out)
    run_sections(bench, flags.sections)
    print("\n| section | what | figure | goal |\n|---|---|---|---|")
    for line in bench.lines:
        print(f"| {line.section} | {line.what} | {line.value} | {line.goal} |")
    return 0


if __name__ == "__main__":
    run(main)
