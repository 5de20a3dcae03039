"""Plans one packed forward: the order of the tokens, where they are stored, and what each may see.

Everything here is computed once per step with numpy and used by every layer. Segments of similar size form a
*group* that one attention call serves, padded to its longest member. What a group's tokens see depends on the
layer's sliding window; each window that occurs in the step gets one *view*, made when the first layer asks
for it.

Shapes: N packed tokens, B sequences of a group, n queries of each, L keys of each, G query heads per
kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.kv.pages import SequenceKv

MIN_ROWS = 4
"""Fewest query rows of one attention problem. With fewer rows kernels are slower or add up in another
order."""
FOLD_LIMIT = 64
"""Most queries for which the query heads of one kv head become rows of one attention problem."""
CALL_COST = 4096
"""Query-key pairs whose computation costs as much as one more attention call."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence to run now.

    They become the next scratch entries. `parents` has for each the scratch offset of its parent (perhaps one
    of this call), or -1 for the last committed token; None is one chain that continues the scratch. `wanted`
    are the indices of the tokens whose logits are returned.
    """

    kv: SequenceKv
    tokens: Sequence[int]
    parents: Sequence[int] | None
    wanted: Sequence[int]
    featured: Sequence[int] = ()
    """Indices of the tokens whose features are taken, if the forward takes features."""
    certain: int = 0
    """How many tokens at the beginning are a chain that the next commit keeps as a whole."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest size of a service's steps."""

    tokens: int
    rows: int
    """Rows of logits."""


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of a group see through one window."""

    slots: torch.Tensor
    """[B * L] int64, the slots of the keys and values; padded with a slot of the same sequence."""
    mask: torch.Tensor | None
    """Added to the scores: [B, 1, G * n, L] when folded, otherwise [B, 1, n, L]. None: nothing is hidden, or
    `causal` says what is."""
    causal: bool
    folded: bool
    open_keys: int
    """How many of the first keys every query sees, if there is a mask."""
    counts: torch.Tensor
    """[B] int64 on the CPU, the queries of each sequence without padding."""
    ends: torch.Tensor
    """[B * n] int64 on the CPU, the number of keys up to the last one that a query sees."""


@dataclass(slots=True)
class Group:
    """Sequences that one attention call serves."""

    members: list[SequenceKv]
    counts: list[int]
    """New tokens of each member, its last scratch entries."""
    start: int
    """Packed position of the first member's first token; the others follow."""
    width: int
    """n, the queries of a member with padding."""
    rows: torch.Tensor | None
    """[B * n] packed position of every query, padding included; None when they simply follow `start`."""
    valid: torch.Tensor | None
    """Which of the B * n results belong to real queries; None when all do."""
    views: dict[tuple[int | None, int | None], View] = field(default_factory=dict)
    """Views by window, and by how many queries of a mask are folded: 0 for none, None for a kernel."""

    @property
    def stop(self) -> int:
        """Packed position after the last member's last token."""
        return self.start + sum(self.counts)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One planned forward."""

    tokens: torch.Tensor
    """[1, N] int64, padding at the end."""
    positions: torch.Tensor
    """[1, N] int64."""
    wanted: torch.Tensor
    """[W] int64, packed positions whose logits are wanted, padding at the end."""
    slots: torch.Tensor
    """[N - padding] int64, where the keys and values of the tokens go."""
    groups: list[Group]
    queries_per_kv: int
    dtype: torch.dtype
    """The dtype in which attention computes."""
    featured: Sequence[int] = ()
    """[F] packed positions of the tokens whose features are taken."""
    first_rows: Sequence[int] = ()
    """Packed position of each segment's first token."""

    def view(self, group: Group, window: int | None, fold: bool) -> View:
        """Return what `group` sees in a layer with this sliding window; `fold` forces folding."""
        return self._view(group, window, self.queries_per_kv if fold or group.width <= FOLD_LIMIT else 0)

    def plain_view(self, group: Group, window: int | None) -> View:
        """Do as `view` for a kernel that reads one row of the mask for each query; it is never `causal`."""
        return self._view(group, window, None)

    def _view(self, group: Group, window: int | None, folded: int | None) -> View:
        if (window, folded) not in group.views:
            group.views[window, folded] = _make_view(group, window, folded, self)
        return group.views[window, folded]


def pack_step(
    segments: Sequence[Segment],
    *,
    queries_per_kv: int,
    dtype: torch.dtype,
    device: torch.device,
    padded: bool = True,
) -> PackedStep:
    """Pack one forward over segments whose tokens were already appended to their sequences.

    Sizes of `padded` steps are a few fixed ones; see `padded_size`.
    """
    size = partial(padded_size, dtype=dtype) if padded else int
    groups: list[Group] = []
    order: list[int] = []
    start = 0
    for members in group_alike([(len(s.tokens), s.kv.length + s.kv.scratch) for s in segments]):
        groups.append(_make_group([segments[i] for i in members], start, queries_per_kv, device))
        order.extend(members)
        start = groups[-1].stop
    rows, first_row = _rows_of(segments, order, size(start))
    wanted = [first_row[i] + index for i, segment in enumerate(segments) for index in segment.wanted]
    wanted += [0] * (size(len(wanted)) - len(wanted))
    packed = torch.from_numpy(rows).to(device)
    return PackedStep(
        tokens=packed[0:1],
        positions=packed[1:2],
        wanted=torch.tensor(wanted, dtype=torch.int64, device=device),
        slots=packed[2, :start],
        groups=groups,
        queries_per_kv=queries_per_kv,
        dtype=torch.float32 if device.type == "cpu" else dtype,
        featured=[first_row[i] + index for i, segment in enumerate(segments) for index in segment.featured],
        first_rows=first_row,
    )


def _rows_of(
    segments: Sequence[Segment], order: Sequence[int], size: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the tokens, positions and slots [3, size] of segments that are packed in this order, and the row
    at which each segment begins."""
    rows = np.zeros((3, size), dtype=np.int64)
    first_row = [0] * len(segments)
    stop = 0
    for i in order:
        kv, count = segments[i].kv, len(segments[i].tokens)
        first_row[i], stop = stop, stop + count
        rows[0, first_row[i] : stop] = segments[i].tokens
        rows[1, first_row[i] : stop] = kv.positions(kv.scratch - count)
        rows[2, first_row[i] : stop] = kv.slots[kv.length + kv.scratch - count : kv.length + kv.scratch]
    return rows, first_row


def padded_size(count: int, dtype: torch.dtype) -> int:
    """Return how many rows `count` rows are padded to.

    Sizes are few because the library builds a kernel for the first product of each size, which takes as long
    as a small step. A float32 step never has a single row: a single row would use a kernel with another order
    of additions, and a token's result should not depend on what else is in the batch.
    """
    least = max(count, 2 if dtype == torch.float32 else 1)
    multiple = 1 if least <= 16 else 4 if least <= 64 else 16
    return -(-least // multiple) * multiple


def group_alike(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return indices of (queries, keys), grouped where padding costs less than one more attention call."""
    groups: list[list[int]] = []
    real = keys = 0
    for i in sorted((i for i in range(len(sizes)) if sizes[i][0]), key=sizes.__getitem__):
        queries, length = sizes[i]
        padded = (len(groups[-1]) + 1) * queries * max(keys, length) if groups else 0
        if groups and queries <= FOLD_LIMIT and padded - real - queries * length <= CALL_COST:
            groups[-1].append(i)
            real, keys = real + queries * length, max(keys, length)
        else:
            groups.append([i])
            real, keys = queries * length, length
    return groups


def _make_group(segments: list[Segment], start: int, queries_per_kv: int, device: torch.device) -> Group:
    counts = [len(segment.tokens) for segment in segments]
    width = max(*counts, -(-MIN_ROWS // queries_per_kv))
    rows = valid = None
    if min(counts) < width:
        first = np.cumsum([start, *counts[:-1]])
        offsets = np.arange(width)
        real = offsets < np.array(counts)[:, None]
        rows = torch.from_numpy((first[:, None] + offsets * real).ravel()).to(device)
        valid = torch.from_numpy(np.flatnonzero(real)).to(device)
    return Group([segment.kv for segment in segments], counts, start, width, rows, valid)


def _make_view(group: Group, window: int | None, folded: int | None, step: PackedStep) -> View:
    """Make the view of a group; `folded` as in `Group.views`."""
    starts = [kv.scratch - count for kv, count in zip(group.members, group.counts, strict=True)]
    firsts = [_first_visible(kv, start, window) for kv, start in zip(group.members, starts, strict=True)]
    ends = [kv.length + kv.scratch for kv in group.members]
    width = max(end - first for end, first in zip(ends, firsts, strict=True))
    slots = np.empty((len(ends), width), dtype=np.int64)
    # Without a window every row sees the entries that are committed in all sequences, so only later columns
    # are computed.
    common = 0 if window is not None else min(kv.length for kv in group.members)
    seen = np.zeros((len(ends), group.width, width - common), dtype=np.bool_)
    if not common:
        seen[:, :, 0] = True  # padding rows see one key, so that no softmax is empty
    for row, (kv, start, first, end) in enumerate(zip(group.members, starts, firsts, ends, strict=True)):
        slots[row, : end - first] = kv.slots[first:end]
        slots[row, end - first :] = kv.slots[first]
        seen[row, : kv.scratch - start, : end - first - common] = _visible(kv, start, first + common, window)
    device = step.tokens.device
    causal = folded == 0 and _is_plain_prefill(group, ends, window)
    mask, open_keys = None, 0
    if not causal and not seen.all():
        open_keys = common + int(seen.all((0, 1)).argmin())
        hidden = _hidden(seen, common, folded or 1)
        mask = torch.from_numpy(hidden).to(device, step.dtype)
    places, counts = torch.from_numpy(slots.ravel()).to(device), torch.tensor(group.counts)
    last = np.where(seen.any(2), seen.shape[2] - seen[:, :, ::-1].argmax(2), 0)
    return View(
        places, mask, causal, bool(folded), open_keys, counts, torch.from_numpy((common + last).ravel())
    )


def _hidden(seen: npt.NDArray[np.bool_], common: int, copies: int) -> npt.NDArray[np.float32]:
    """Return what is added to the scores [B, 1, copies * n, L]; `seen` [B, n, L - common] is for the last
    keys.

    The first `common` columns are zeros, which are not touched here and which the project's kernels never
    read.
    """
    batch, rows, keys = seen.shape
    hidden = np.zeros((batch, copies, rows, common + keys), dtype=np.float32)
    hidden[..., common:] = np.where(seen, np.float32(0), np.float32("-inf"))[:, None]
    return hidden.reshape(batch, 1, copies * rows, common + keys)


def _is_plain_prefill(group: Group, ends: list[int], window: int | None) -> bool:
    """True if the group is one chain from the very first position that no window cuts."""
    chain = len(ends) == 1 and ends == group.counts and group.members[0].is_chain
    return chain and (window is None or window >= ends[0])


def _first_visible(kv: SequenceKv, start: int, window: int | None) -> int:
    """Return the first entry that any of the scratch entries from `start` on sees."""
    if window is None:
        return 0
    return min(max(int(kv.positions(start).min()) - window + 1, 0), kv.length)


def _visible(kv: SequenceKv, start: int, first: int, window: int | None) -> npt.NDArray[np.bool_]:
    """Return [new, entries from `first` on]: what the scratch entries from `start` on see."""
    seen = np.ones((kv.scratch - start, kv.length + kv.scratch - first), dtype=np.bool_)
    seen[:, kv.length - first :] = kv.ancestors(start)
    if window is not None:
        columns = np.concatenate([np.arange(first, kv.length), kv.positions(0)])
        seen &= kv.positions(start)[:, None] - columns < window
    return seen
