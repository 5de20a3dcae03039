"""Compares keys and values of 8 bits with those of 16: a section of `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_bench import Bench, captured_ms, one_step
from benchmarks.gpu_pair import committed, open_step, tree_segment
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.runner import Segment

LAYERS = 8
"""Most layers whose pages attention reads in turn: no cache holds all pages of long contexts."""
WORK = ((1, 0), (8, 0), (1, 32))
"""Sequences, and nodes of a tree below the last token of each."""


def fp8_kv(bench: Bench) -> None:
    """Attention of a layer over pages of 8 and of 16 bits with the same numbers, and the target's steps."""
    whole: GraphRunner = bench.made["target_runner"]
    small = bench.runner(replace(bench.made["target"], fp8_kv=True), bench.room, buckets=(1, 40))
    read = small.loaded.kv_bytes_per_token / small.loaded.geometry.num_layers / bench.made["bandwidth"] * 1e3
    for context in bench.contexts:
        for batch, nodes in WORK:
            what = f"context {context}, {batch} x {1 + nodes} tokens"
            _same_numbers(small, whole)
            (ours_ms, theirs_ms), error = _attention(bench, (small, whole), context, batch, nodes)
            bench.say(f"{what}: 8 | 16 bits", f"{ours_ms:.4f} | {theirs_ms:.4f} ms")
            bench.say(f"{what}: 8 bits x reading them", f"{ours_ms / (batch * context * read):.2f}")
            bench.say(f"{what}: relative difference", f"{error:.1e}", "< 1e-2")
        for nodes in (0, 32):
            ours_ms, theirs_ms = (one_step(bench, runner, context, nodes)[0] for runner in (small, whole))
            what = f"context {context}, {1 + nodes} tokens: step, 8 | 16 bits"
            bench.say(what, f"{ours_ms:.3f} | {theirs_ms:.3f} ms")


def _same_numbers(small: GraphRunner, whole: GraphRunner) -> None:
    """Round all entries to 8 bits in both; steps have written others to each."""
    for ours, theirs in zip(small.attention.stores(), whole.attention.stores(), strict=True):
        for layer in range(len(ours)):
            ours[layer] = theirs[layer].to(torch.float8_e4m3fn).view(torch.uint8)
            theirs[layer] = ours[layer].view(torch.float8_e4m3fn).to(theirs.dtype)


def _attention(
    bench: Bench, runners: Sequence[GraphRunner], context: int, batch: int, nodes: int
) -> tuple[list[float], float]:
    """Milliseconds of a layer's attention by each of two runners over the same slots, and the relative
    difference of what they give.
    """
    geometry = runners[0].loaded.geometry
    texts = [committed(runners[0], context) for _ in range(batch)]
    segments = [tree_segment(kv, nodes) for kv in texts]
    runners[0].append(segments)
    shape = (batch * (1 + nodes), geometry.query_heads, geometry.head_dim)
    query = torch.randn(shape, dtype=bench.dtype, device=bench.device)
    layers = range(min(LAYERS, geometry.num_layers))
    times, found = [], []
    for runner in runners:
        times.append(_milliseconds(bench, runner, segments, query, layers))
        runner.attention.step = open_step(runner, segments)
        found.append(runner.attention.mix(0, query, _scores(query)).float())
    for kv in texts:
        kv.release()
    return times, float((found[0] - found[1]).norm() / found[1].norm())


def _milliseconds(
    bench: Bench, runner: GraphRunner, segments: Sequence[Segment], query: torch.Tensor, layers: range
) -> float:
    """Milliseconds of one layer's attention, in a graph: launches by the host do not count."""
    runner.attention.step, scores = open_step(runner, segments), _scores(query)
    with torch.inference_mode():
        whole = captured_ms(bench, lambda layer: runner.attention.mix(layer, query, scores), layers)
    return whole / len(layers)


def _scores(query: torch.Tensor) -> Scores:
    return Scores(query.shape[-1] ** -0.5, None)
