"""Drafts with a model: a forward over the chosen nodes of all sequences, ranked with the shared noise.

Keys and values of one sequence (see `outrider.engine.kv.pages`):

    [0, length)                   committed and computed
    [length, length + scratch)    expanded nodes, parents first; `offsets` says where each is
    tokens[length:]               committed but not computed yet: the tail. While there is a tail, no node is
                                  expanded; it is computed as a chain together with the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import Expansion, PageCounts, Proposal
from draft_service.drafters.text import DraftText, proposals_of
from draft_service.scheduler import PREFILL_CHUNK, divide
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.grammar.matcher import Matcher
from outrider.protocol.errors import Overloaded
from outrider.protocol.messages import OpenDraft
from outrider.sampling.chooser import prepare
from outrider.speculation.candidate_tree import Node, Rerooted


@dataclass(slots=True)
class _Sequence:
    """One sequence; `kv` is None when it holds no memory."""

    text: DraftText
    kv: SequenceKv | None = None
    offsets: dict[int, int] = field(default_factory=dict)
    """Scratch offset of each expanded node, by node id, in rising order."""


@dataclass(slots=True)
class _Feed:
    """What one forward computes for one sequence: a piece of the tail, then nodes."""

    sequence: _Sequence
    kv: SequenceKv
    tail: list[int]
    complete: bool
    """True where the tail ends here, so that nodes may follow."""
    wanted: list[tuple[int, int]] = field(default_factory=list)
    """For each wanted row of logits, the index of its token and of the expansion that it answers."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    placed: dict[int, int] = field(default_factory=dict)
    """Scratch offsets of the nodes that are computed here, by id."""


class ModelDrafter:
    """Drafts with a smaller model that has the target's vocabulary."""

    kind = "model"
    expands = True

    def __init__(self, runner: ModelRunner, *, children: int, max_nodes: int) -> None:
        self.context_length = runner.loaded.context_length
        self._runner = runner
        self._children = children
        self.max_nodes = max_nodes
        self._eos_token_ids = runner.loaded.eos_token_ids
        self._sequences: dict[int, _Sequence] = {}
        prepare()

    def open(self, key: int, request: OpenDraft) -> int:
        """See Drafter; uses the cached pages of the sequence's beginning.

        Raises:
            Overloaded: there is no memory for it.
        """
        sequence = _Sequence(DraftText.opened(request))
        tokens, kv = sequence.text.tokens, self._kv(sequence)
        if len(tokens) <= self.context_length and not self._has_room(len(tokens) - kv.length):
            kv.release()
            raise Overloaded(f"no KV memory is left for {len(tokens)} tokens; retry later or raise kv_tokens")
        self._sequences[key] = sequence
        cached = kv.length
        self._free_if_over(key)
        return cached

    def constrain(self, key: int, matcher: Matcher) -> None:
        """See Drafter."""
        self._sequences[key].text.matcher = matcher

    def recall(self, key: int) -> Proposal:
        """See Drafter and `DraftText.recall`."""
        return self._sequences[key].text.recall()

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter: one forward over a tail piece and nodes of each sequence."""
        feeds = self._plan(expansions)
        try:
            logits = self._runner.forward([_segment(feed) for feed in feeds])  # [answered, V]
        except (MemoryError, RuntimeError):
            self._runner.pool.forget()  # a runner may have put off moves until this forward
            raise
        for feed in feeds:
            self._settle(feed)
        answered = [(feed.sequence.text, index) for feed in feeds for _, index in feed.wanted]
        asked = [(text, expansions[index]) for text, index in answered]
        found = proposals_of(logits, asked, self._children, self._eos_token_ids)
        proposals: list[Proposal | None] = [None] * len(expansions)
        for (_, index), proposal in zip(answered, found, strict=True):
            proposals[index] = proposal
        return proposals

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """See Drafter."""
        sequence = self._sequences[key]
        sequence.text.append(tokens)
        self._free_if_over(key)
        if sequence.kv is None or not sequence.offsets:
            return
        offsets = sequence.offsets
        keep = [offsets.pop(node.id) for node in rerooted.walked if node.id in offsets]
        for node in rerooted.dropped:
            offsets.pop(node.id, None)
        assert len(keep) == len(tokens) or not offsets, "a node survives whose root is not computed"
        self._runner.commit(sequence.kv, keep, tokens[: len(keep)], list(offsets.values()))
        sequence.offsets = {node_id: offset for offset, node_id in enumerate(offsets)}

    def fits(self, key: int) -> bool:
        """See Drafter."""
        return self._has_room(len(self._sequences[key].text.tokens))

    def reset(self, key: int) -> None:
        """See Drafter."""
        sequence = self._sequences[key]
        if sequence.kv is not None:
            sequence.kv.release()
        sequence.kv = None
        sequence.offsets = {}

    def close(self, key: int) -> None:
        """See Drafter."""
        self.reset(key)
        del self._sequences[key]

    def exchange(self, other: ModelDrafter) -> None:
        """From now on draft with the model of another drafter, which has no sequences and the same
        vocabulary. All sequences are computed again."""
        for key in self._sequences:
            self.reset(key)
        self._runner = other._runner
        self.context_length, self.max_nodes = other.context_length, other.max_nodes

    def pages(self) -> PageCounts:
        """See Drafter."""
        statistics = self._runner.pool.statistics()
        return PageCounts(statistics.total, statistics.used, statistics.cached)

    def _free_if_over(self, key: int) -> None:
        """Free a sequence's memory once it is beyond the context, where nothing is computed any more."""
        if len(self._sequences[key].text.tokens) > self.context_length:
            self.reset(key)

    def _has_room(self, tokens: int) -> bool:
        """True if `tokens` tokens and a tree below them can be stored."""
        pool = self._runner.pool
        return tokens + self.max_nodes <= pool.available * pool.page_size

    def _kv(self, sequence: _Sequence) -> SequenceKv:
        if sequence.kv is None:
            sequence.kv = SequenceKv.open(self._runner.pool, sequence.text.tokens)
        return sequence.kv

    def _plan(self, expansions: Sequence[Expansion]) -> list[_Feed]:
        """Return what to compute for each sequence, with tails within the prefill budget."""
        sequences = {expansion.key: self._sequences[expansion.key] for expansion in expansions}
        missing = {key: len(each.text.tokens) - self._kv(each).length for key, each in sequences.items()}
        tails = divide(missing, PREFILL_CHUNK)
        feeds = {key: self._feed(each, tails[key]) for key, each in sequences.items()}
        for index, expansion in enumerate(expansions):
            if feeds[expansion.key].complete:
                _place(feeds[expansion.key], index, expansion.node)
        return [feed for feed in feeds.values() if feed.tokens]

    def _feed(self, sequence: _Sequence, length: int) -> _Feed:
        """Return a feed with the next `length` tokens of the tail."""
        kv = self._kv(sequence)
        tokens = sequence.text.tokens
        tail = tokens[kv.length : kv.length + length]
        complete = kv.length + len(tail) == len(tokens)
        return _Feed(sequence, kv, tail, complete, tokens=list(tail), parents=list(range(-1, len(tail) - 1)))

    def _settle(self, feed: _Feed) -> None:
        """Commit the computed tail and remember where the nodes are."""
        done = len(feed.tail)
        if done:
            nodes = range(done, len(feed.tokens))
            self._runner.commit(feed.kv, range(done), feed.tail, nodes)
            feed.sequence.text.lookup.index()
        for node_id, offset in feed.placed.items():
            feed.sequence.offsets[node_id] = offset - done


def _place(feed: _Feed, index: int, node: Node | None) -> None:
    """Add an expansion to a feed; the root is answered by the last token of the tail."""
    if node is None:
        feed.wanted.append((len(feed.tail) - 1, index))
        return
    feed.wanted.append((len(feed.tokens), index))
    feed.parents.append(_offset(feed, node.parent))
    feed.placed[node.id] = feed.kv.scratch + len(feed.tokens)
    feed.tokens.append(node.token)


def _offset(feed: _Feed, node: Node | None) -> int:
    """Return the scratch offset of an expanded node, or of one that this feed expands."""
    if node is None:
        return len(feed.tail) - 1
    placed = feed.placed.get(node.id)
    return feed.sequence.offsets[node.id] if placed is None else placed


def _segment(feed: _Feed) -> Segment:
    wanted = [place for place, _ in feed.wanted]
    return Segment(feed.kv, feed.tokens, feed.parents, wanted, certain=len(feed.tail))
