"""Drafts with a head: one layer that reads features of the target's layers (EAGLE-3, MTP).

A row is a token and the feature of the token before it. Features of committed tokens are the target's, and
come with verdicts. Below them features are the head's own results, so the tree grows ahead of verification
like any other. Keys and values of a row depend only on its token and its feature:

    store     rows of committed tokens, with the target's features; a token without a feature has no row
    nodes     rows of expanded nodes, with the head's own features, until the node is committed or dropped

A commit brings the target's feature of the new last token, so the root is expanded again with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from draft_service.drafters.base import Expansion, PageCounts, Proposal
from draft_service.drafters.text import DraftText, proposals_of
from draft_service.scheduler import PREFILL_CHUNK, divide
from outrider.engine.features import from_bytes
from outrider.engine.heads.base import Head, Mix, Rows
from outrider.engine.heads.store import RowStore, seen_in_tree
from outrider.grammar.matcher import Matcher
from outrider.protocol.errors import OutOfPages, Overloaded
from outrider.protocol.messages import OpenDraft
from outrider.sampling.chooser import prepare
from outrider.speculation.candidate_tree import Node, Rerooted

PAGE_ROWS = 16
"""Rows that count as one page."""


@dataclass(slots=True)
class _Expanded:
    """An expanded node."""

    entries: Tensor
    """Keys and values, a row of the head's entries."""
    feature: Tensor | None = None
    """Feature [C] of the rows below."""


@dataclass(slots=True)
class _Sequence:
    """One sequence. Rows of committed tokens that arrived wait in `told` until they are computed."""

    text: DraftText
    layers: int
    """Number of the target's layers whose features arrive, side by side."""
    columns: list[int] | None
    """The indices of those that the head reads; None: not all of the head's layers arrive, and it reads
    nothing."""
    store: RowStore = field(default_factory=RowStore)
    told: list[tuple[int, Tensor]] = field(default_factory=list)
    """For each piece the position of its first token, and rows [N, columns of `Head.fuse`]."""
    known: int = 1
    """The position before which rows are not needed any more."""
    last: tuple[int, Tensor] | None = None
    """Position and feature [C] of the newest row in the store."""
    feature: Tensor | None = None
    """Feature [C] of the rows below the root."""
    nodes: dict[int, _Expanded] = field(default_factory=dict)
    """Expanded nodes by id."""

    @property
    def rows(self) -> int:
        """Number of rows of committed tokens, in the store or waiting for it."""
        return len(self.store) + sum(len(rows) for _, rows in self.told)

    @property
    def waits(self) -> bool:
        """True until the row of the last token is in the store or has arrived."""
        return self.known < len(self.text.tokens) or not (self.told or self.last)

    def forget(self) -> None:
        """Drop all rows; later ones are accepted again."""
        self.store, self.told, self.nodes = RowStore(), [], {}
        self.last = self.feature = None


@dataclass(slots=True)
class _Batch:
    """Rows of one forward."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    """Features [rows, C] of each piece."""

    def add(self, tokens: Sequence[int], position: int, features: Tensor) -> slice:
        """Add rows of tokens that follow each other; return their range."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(position, position + len(tokens)))
        self.features.append(features)
        return slice(start, len(self.tokens))


@dataclass(frozen=True, slots=True)
class _Asked:
    """An expansion that this forward answers, and its row."""

    index: int
    key: int
    node: Node | None
    row: int


class HeadDrafter:
    """Drafts with a head for the target, which reads the features that come with verdicts."""

    expands = True

    def __init__(
        self,
        head: Head,
        *,
        children: int,
        max_nodes: int,
        max_rows: int,
        context_length: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`max_rows` is the most rows of committed tokens that are held, over all sequences."""
        self.kind = head.kind
        self.context_length = context_length
        self._head = head
        self._children = children
        self.max_nodes = max_nodes
        self._max_rows = max_rows
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[int, _Sequence] = {}
        prepare()

    def open(self, key: int, request: OpenDraft) -> int:
        """See Drafter; nothing is cached.

        Raises:
            Overloaded: there is no memory for it.
        """
        if not self.fits(key):
            raise Overloaded(f"{self._rows()} rows are held, the limit; retry later or raise kv_tokens")
        come, read = request.feature_layers, self._head.feature_layers
        columns = [come.index(layer) for layer in read] if set(read) <= set(come) else None
        self._sequences[key] = _Sequence(DraftText.opened(request), len(come), columns)
        return 0

    def constrain(self, key: int, matcher: Matcher) -> None:
        """See Drafter."""
        self._sequences[key].text.matcher = matcher

    def recall(self, key: int) -> Proposal:
        """See Drafter and `DraftText.recall`."""
        return self._sequences[key].text.recall()

    def tell(self, key: int, rows: bytes, position: int | None = None) -> None:
        """See FeatureReader."""
        sequence = self._sequences[key]
        if sequence.columns is None:
            return
        width, end = self._head.target_hidden_size, len(sequence.text.tokens)
        came = from_bytes(rows, sequence.layers * width).view(-1, sequence.layers, width)
        first = end - len(came) if position is None else position
        skipped = max(sequence.known - first, 0)
        new = came[skipped : end - first, sequence.columns].flatten(1)
        if len(new):
            sequence.told.append((first + skipped, new))
            sequence.known = first + skipped + len(new)

    def waits(self, key: int) -> bool:
        """See FeatureReader."""
        return self._sequences[key].waits

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter: one forward over rows of committed tokens and over nodes."""
        if self._rows() > self._max_rows:
            raise OutOfPages(f"{self._rows()} rows are held, more than {self._max_rows}; raise kv_tokens")
        proposals: list[Proposal | None] = [None] * len(expansions)
        batch = _Batch()
        fed = self._feed(list(dict.fromkeys(expansion.key for expansion in expansions)), batch)
        asked = [each for index, one in enumerate(expansions) if (each := self._ask(index, one, fed, batch))]
        if not batch.tokens:
            return proposals
        logits = self._compute(fed, asked, batch)
        if logits is None:
            return proposals
        rows = [(self._sequences[each.key].text, expansions[each.index]) for each in asked]
        found = proposals_of(logits, rows, self._children, self._eos_token_ids)
        for each, proposal in zip(asked, found, strict=True):
            proposals[each.index] = proposal
        return proposals

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """See Drafter; the features of the tokens arrive afterwards."""
        sequence, walked = self._sequences[key], rerooted.walked
        sequence.text.append(tokens)
        root = sequence.nodes.get(walked[-1].id) if walked and len(walked) == len(tokens) else None
        sequence.feature = None if root is None else root.feature
        for node in (*walked, *rerooted.dropped):
            sequence.nodes.pop(node.id, None)

    def fits(self, key: int) -> bool:
        """See Drafter."""
        return self._rows() + self.max_nodes <= self._max_rows

    def reset(self, key: int) -> None:
        """See Drafter. Rows that arrived cannot be asked for again, so the sequence goes on from the next
        ones."""
        self._sequences[key].forget()

    def close(self, key: int) -> None:
        """See Drafter."""
        del self._sequences[key]

    def pages(self) -> PageCounts:
        """See Drafter."""
        return PageCounts(self._max_rows // PAGE_ROWS, -(-self._rows() // PAGE_ROWS))

    def _rows(self) -> int:
        return sum(sequence.rows for sequence in self._sequences.values())

    def _feed(self, keys: Sequence[int], batch: _Batch) -> dict[int, list[slice]]:
        """Add the rows that arrived to the batch, up to a chunk; return their ranges by key."""
        pieces = list(self._pieces(keys))
        fed: dict[int, list[slice]] = {key: [] for key in keys}
        if not pieces:
            return fed
        fused = self._head.fuse(torch.cat([rows for *_, rows in pieces]))
        for key, position, rows in pieces:
            own, fused = fused[: len(rows)], fused[len(rows) :]
            sequence = self._sequences[key]
            tokens = sequence.text.tokens[position : position + len(rows)]
            fed[key].append(batch.add(tokens, position, own))
            sequence.last = position + len(rows) - 1, own[-1].clone()
            sequence.text.lookup.index()
        return fed

    def _pieces(self, keys: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Take out rows that arrived, at most a chunk in all; yield key, position and rows."""
        waiting = {key: sum(len(rows) for _, rows in self._sequences[key].told) for key in keys}
        for key, room in divide(waiting, PREFILL_CHUNK).items():
            told = self._sequences[key].told
            while told and room:
                position, rows = told.pop(0)
                if len(rows) > room:
                    told.insert(0, (position + room, rows[room:]))
                yield key, position, rows[:room]
                room -= min(len(rows), room)

    def _ask(
        self, index: int, expansion: Expansion, fed: dict[int, list[slice]], batch: _Batch
    ) -> _Asked | None:
        """Add an expansion to the batch and return it with its row; None if something before it is not
        computed yet."""
        key, node, sequence = expansion.key, expansion.node, self._sequences[expansion.key]
        if sequence.told or sequence.waits or sequence.last is None:
            return None
        position, feature = sequence.last
        if node is None:
            row = (
                fed[key][-1].stop - 1
                if fed[key]
                else _one(batch, sequence.text.tokens[-1], position, feature)
            )
            return _Asked(index, key, None, row)
        parent = sequence.feature if node.parent is None else _feature(sequence, node.parent)
        if parent is None:
            return None
        return _Asked(index, key, node, _one(batch, node.token, position + node.depth, parent))

    def _compute(self, fed: dict[int, list[slice]], asked: Sequence[_Asked], batch: _Batch) -> Tensor | None:
        """Return logits [asked, V], or None if nothing was asked, and keep keys, values and features."""
        device = self._head.device
        rows = Rows(
            torch.tensor(batch.tokens, device=device),
            torch.tensor(batch.positions, device=device),
            torch.cat(batch.features),
            [each.row for each in asked],
        )
        computed = self._head.compute(rows, partial(self._attend, fed, asked))
        if computed is None:
            return None
        features, logits = computed
        for each, feature in zip(asked, features, strict=True):
            sequence = self._sequences[each.key]
            if each.node is None:
                sequence.feature = feature
            else:
                sequence.nodes[each.node.id].feature = feature
        return logits

    def _attend(
        self, fed: dict[int, list[slice]], asked: Sequence[_Asked], queries: Tensor, entries: Tensor, mix: Mix
    ) -> Tensor:
        """See `Attend`; the entries of committed tokens go into the stores, those of nodes to the nodes."""
        for key, slices in fed.items():
            for piece in slices:
                self._sequences[key].store.append(entries[piece])
        for each in asked:
            if each.node is not None:
                self._sequences[each.key].nodes[each.node.id] = _Expanded(entries[each.row].clone())
        if not asked:
            return queries[:0]
        keys = dict.fromkeys(each.key for each in asked)
        parts = [self._attend_one(key, asked, queries, mix) for key in keys]
        result = queries.new_empty((len(asked), parts[0][1].shape[1]))
        for places, mixed in parts:
            result[places] = mixed
        return result

    def _attend_one(
        self, key: int, asked: Sequence[_Asked], queries: Tensor, mix: Mix
    ) -> tuple[list[int], Tensor]:
        """Return the places in `asked` of one sequence, and their attention results."""
        places = [place for place, each in enumerate(asked) if each.key == key]
        sequence = self._sequences[key]
        paths = [_path(asked[place].node) for place in places]
        columns = list(dict.fromkeys(node for path in paths for node in path))
        below = [sequence.nodes[node].entries[None] for node in columns]
        seen = seen_in_tree(len(sequence.store), paths, columns).to(queries.device)
        rows = [asked[place].row for place in places]
        return places, mix(queries[rows], torch.cat([sequence.store.entries, *below]), seen)


def _one(batch: _Batch, token: int, position: int, feature: Tensor) -> int:
    """Add a single row; return its index."""
    batch.add([token], position, feature[None])
    return len(batch.tokens) - 1


def _feature(sequence: _Sequence, node: Node) -> Tensor | None:
    """Return the feature of the rows below a node."""
    expanded = sequence.nodes.get(node.id)
    return None if expanded is None else expanded.feature


def _path(node: Node | None) -> list[int]:
    """Return the ids on the path of a node, its own first."""
    path: list[int] = []
    while node is not None:
        path.append(node.id)
        node = node.parent
    return path
