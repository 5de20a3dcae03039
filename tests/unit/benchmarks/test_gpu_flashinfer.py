"""What FlashInfer is told of a step, on a stand-in that computes densely what its documentation says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.engine.attention import PagedAttention
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loaded_model import Geometry
from outrider.engine.runner import Segment
from outrider.engine.step import pack_step

PAGE, PAGES = 4, 64
GEOMETRY = Geometry(1, 4, 2, 16, 16)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone")


class Prefill:
    """Of sequences whose query rows follow each other; a causal mask ends at the last entry."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, rows, pages, indices, last, *shape, causal, custom_mask, **_) -> None:
        """See FlashInfer."""
        self.rows, self.pages, self.indices, self.last = rows, pages, indices, last
        self.heads, self.causal, self.mask, self.shape = shape[:2], causal, custom_mask, shape

    def run(self, query: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
        """[N, Q, D]; memory is [pages, page, H, D] twice."""
        mixed, used = [], 0
        for i in range(len(self.last)):
            table = self.indices[self.pages[i] : self.pages[i + 1]]
            count = (len(table) - 1) * self.shape[3] + int(self.last[i])
            k, v = (part[table].flatten(0, 1)[:count].repeat_interleave(2, 1) for part in memory)
            q = query[self.rows[i] : self.rows[i + 1]]
            seen = torch.ones(len(q), count, dtype=torch.bool)
            if self.mask is not None:
                seen = self.mask[used : used + seen.numel()].view(seen.shape)
            elif self.causal:
                seen = seen.tril(count - len(q))
            used += seen.numel()
            scores = torch.einsum("nhd,lhd->hnl", q, k) / q.shape[-1] ** 0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            mixed.append(torch.einsum("hnl,lhd->nhd", weights, v))
        return torch.cat(mixed)


class Decode(Prefill):
    """One row of each sequence, which sees all of its entries."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        super().__init__(workspace, layout)

    def plan(self, pages, indices, last, *shape, **_) -> None:
        """See FlashInfer."""
        super().plan(
            torch.arange(len(last) + 1), pages, indices, last, *shape, causal=False, custom_mask=None
        )


@pytest.mark.parametrize("kind", ["decode", "chains", "trees"])
def test_its_pages_and_masks_are_those_of_the_step(kind, monkeypatch):
    """Scattered pages, reserved ones behind the last entry, scratch of earlier steps, trees among chains."""
    from benchmarks import gpu_flashinfer

    names = {"BatchPrefillWithPagedKVCacheWrapper": Prefill, "BatchDecodeWithPagedKVCacheWrapper": Decode}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**names))
    monkeypatch.setattr(gpu_flashinfer, "WORKSPACE", 1)
    generator, pool = torch.Generator().manual_seed(0), PagePool(PAGES, PAGE)
    attention = PagedAttention(GEOMETRY, PAGES * PAGE, torch.float32, CPU)
    entries = attention.keys, attention.values
    for part in entries:
        part.copy_(torch.randn(part.shape, generator=generator))
    segments = [_segment(pool, context, kind) for context in (3, 4, 21)]
    step = pack_step(segments, queries_per_kv=2, dtype=torch.float32, device=CPU)
    total = sum(len(each.tokens) for each in segments)
    query = torch.randn(total, 4, 16, generator=generator)
    ours = gpu_flashinfer.FlashInferStep(segments, GEOMETRY, PAGE, torch.float32, CPU)
    # Slots of the new tokens in the order of the segments, and where the reference has them.
    new = [
        int(s)
        for each in segments
        for s in each.kv.slots[: each.kv.length + each.kv.scratch][-len(each.tokens) :]
    ]
    order = [new.index(int(slot)) for slot in step.slots]
    key, value = (part[0, step.slots].transpose(0, 1)[None] for part in entries)
    layer = torch.nn.Module()
    layer.layer_idx = 0
    with attention.during(step):
        expected, _ = attention.attend(layer, query[order].transpose(0, 1)[None], key, value, None)
    found = ours.attend(query, *(part[0] for part in entries))
    torch.testing.assert_close(found[order], expected[0, : len(order)], rtol=1e-5, atol=1e-5)


def _segment(pool: PagePool, context: int, kind: str) -> Segment:
    kv = SequenceKv.open(pool, [])
    kv.reserve(context)
    kv.append([1] * context, None)
    kv.commit(range(context), [1] * context)
    pool.allocate(1)
    kv.reserve(12)
    parents = None
    if kind == "trees" and context != 4:
        kv.append([2, 2], [-1, -1])
        parents = [0, 1, 2, 0, -1]
    tokens = [3] * (1 if kind == "decode" else 5)
    kv.append(tokens, parents)
    return Segment(kv, tokens, parents, [])
