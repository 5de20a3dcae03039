"""Shows where a step's time goes on the GPU: sections of `benchmarks.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_bench import Bench, repeated_forward
from benchmarks.gpu_pair import bytes_of_step, prefilled
from outrider.engine.runner import ModelRunner

STEPS = 5
"""Profiled steps per table."""
LONGEST = 14
"""Kernels of a table."""
BATCHES = ((8, 0), (8, 4), (32, 0), (32, 4), (32, 15))
"""Sequences, and nodes of a tree below the last token of each."""


def batches(bench: Bench) -> None:
    """Steps of several sequences, and chunks of prompts."""
    runner = bench.made["target_runner"]
    context = bench.contexts[0]
    for batch, nodes in BATCHES[: 1 if bench.tiny else None]:
        step, host = _step_of(bench, runner, [context] * batch, nodes)
        bench.say(f"{batch} sequences of 1 + {nodes}: step | host", f"{step:.3f} | {host:.3f} ms")
    target = bench.made["target"]
    weights = bytes_of_step(target, 0) - target.model.head.weight.nbytes  # one row of logits is computed
    for tokens in (40,) if bench.tiny else (512, 2048):
        text = [5 + index % 300 for index in range(tokens)]
        took = bench.wall_ms(lambda text=text: prefilled(runner, text).release())  # type: ignore[misc]
        rate = tokens * weights / took / 1e9  # two operations for each two bytes
        bench.say(f"prompt of {tokens} tokens", f"{took:.2f} ms, {rate:.0f} TFLOP/s")


def kernels(bench: Bench) -> None:
    """Tables of kernels: how often each runs in a step, and how long."""
    if bench.device.type != "cuda":
        bench.say("kernels", "need a GPU")
        return
    for role, nodes in (("target", 0), ("target", 32), ("draft", 0), ("draft", 7)):
        runner = bench.made[f"{role}_runner"]
        with repeated_forward(runner, bench.contexts[:1], nodes) as forward:
            _table(bench, f"{role}, {1 + nodes} tokens", forward)


def _table(bench: Bench, what: str, forward: Callable[[], object]) -> None:
    for _ in range(3):
        forward()
    bench.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            forward()
        bench.synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    whole = sum(each.self_device_time_total for each in found) / STEPS
    bench.say(f"{what}: all kernels", f"{whole:.0f} us, {sum(e.count for e in found) / STEPS:.0f} launches")
    for each in found[:LONGEST]:
        took = f"{each.self_device_time_total / STEPS:.1f} us in {each.count / STEPS:.0f}"
        bench.say(f"{what}: {each.key[:70]}", took)


def _step_of(bench: Bench, runner: ModelRunner, contexts: Sequence[int], nodes: int) -> tuple[float, float]:
    """Milliseconds of a step with a wait for its end, and of the host's part alone."""
    with repeated_forward(runner, contexts, nodes) as forward:
        step = bench.wall_ms(forward)
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            forward()
        host = (time.perf_counter() - started) / STEPS * 1e3
        bench.synchronize()
    return step, host
