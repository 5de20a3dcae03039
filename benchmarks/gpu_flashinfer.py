"""Runs FlashInfer's attention over our pages: a section of `benchmarks.gpu`, and a reference for `tests/gpu`.

Nothing is served with it.

Shapes: N packed tokens, Q query heads, H kv heads, D head width, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_pair import committed, open_step, tree_segment
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.loaded_model import Geometry
from outrider.engine.runner import Segment

WORKSPACE = 128 << 20
"""Bytes that FlashInfer's documentation recommends."""


class FlashInferStep:
    """The attention of one step, planned: its segments' tokens are appended and their keys stored already."""

    def __init__(
        self,
        segments: Sequence[Segment],
        geometry: Geometry,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> None:
        """One token a sequence takes the kernel for decoding, chains a causal mask, trees a mask of theirs.

        `options` are those of FlashInfer's `plan`, such as `window_left`.
        """
        import flashinfer

        entries = [each.kv.length + each.kv.scratch for each in segments]
        pages = [
            each.kv.pages[: -(-count // page_size)] for each, count in zip(segments, entries, strict=True)
        ]
        tables = [
            _starts(map(len, pages)),
            [page for table in pages for page in table],
            [(count - 1) % page_size + 1 for count in entries],
        ]
        shape = (geometry.query_heads, geometry.kv_heads, geometry.head_dim, page_size)
        tokens = [len(each.tokens) for each in segments]
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        options |= {"q_data_type": dtype, "kv_data_type": dtype}
        chains = all(each.kv.is_chain for each in segments)
        if chains and max(tokens) == 1:
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            tables.insert(0, _starts(tokens))
            options["causal"] = chains
            options["custom_mask"] = None if chains else _mask(segments).to(device)
        self._page_size = page_size
        self._wrapper.plan(
            *(torch.tensor(each, dtype=torch.int32, device=device) for each in tables), *shape, **options
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the result of attention: query [N, Q, D], keys and values [S, H, D] -> [N, Q, D]."""
        pages = tuple(part.view(-1, self._page_size, *part.shape[1:]) for part in (keys, values))
        mixed: Tensor = self._wrapper.run(query, pages)
        return mixed


def _starts(counts: Any) -> list[int]:
    return list(accumulate(counts, initial=0))


def _mask(segments: Sequence[Segment]) -> Tensor:
    """Which entries each new token sees, [tokens, entries] of each segment in one row; True is seen."""
    rows = []
    for segment in segments:
        kv, count = segment.kv, len(segment.tokens)
        ancestors = torch.from_numpy(kv.ancestors(kv.scratch - count))
        rows.append(torch.cat([torch.ones(count, kv.length, dtype=torch.bool), ancestors], 1).flatten())
    return torch.cat(rows)


def flashinfer(bench: Bench) -> None:
    """Attention of one layer by our kernels and by FlashInfer's, where it is installed, over the same pages.

    Planning and storing are left out of both.
    """
    if find_spec("flashinfer") is None:
        bench.say("FlashInfer", "not installed")
        return
    runner = bench.made["target_runner"]
    for context in bench.contexts:
        for batch, tokens, branching in ((1, 1, False), (8, 1, False), (1, 33, True), (1, 512, False)):
            if batch * (context + tokens) <= runner.pool.available * runner.pool.page_size:
                ours, theirs, error = _compared(bench, runner, context, batch, tokens, branching)
                what = f"context {context}, {batch} x {tokens} tokens{' of a tree' if branching else ''}"
                bench.say(f"{what}: kernel | FlashInfer", f"{ours:.3f} | {theirs:.3f} ms")
                bench.say(f"{what}: relative difference", f"{error:.1e}", "< 1e-2")


def _compared(
    bench: Bench, runner: GraphRunner, context: int, batch: int, tokens: int, branching: bool
) -> tuple[float, float, float]:
    """Milliseconds of both, and their relative difference."""
    attention, geometry = runner.attention, runner.loaded.geometry
    texts = [committed(runner, context) for _ in range(batch)]
    segments = [
        tree_segment(kv, tokens - 1) if branching else Segment(kv, [2] * tokens, None, range(tokens))
        for kv in texts
    ]
    runner.append(segments)
    attention.step = open_step(runner, segments)
    scores = Scores(geometry.head_dim**-0.5, None)
    shape = (batch * tokens, geometry.query_heads, geometry.head_dim)
    query = torch.randn(shape, dtype=bench.dtype, device=bench.device)
    memory = [part[0, : attention.trash] for part in attention.stores()]
    peer = FlashInferStep(segments, geometry, runner.pool.page_size, bench.dtype, bench.device)
    with torch.inference_mode():
        ours, theirs = attention.mix(0, query, scores), peer.attend(query, *memory)
        times = (
            bench.device_ms(lambda: attention.mix(0, query, scores)),
            bench.device_ms(lambda: peer.attend(query, *memory)),
        )
    for kv in texts:
        kv.release()
    return *times, float((ours - theirs).float().norm() / theirs.float().norm())
