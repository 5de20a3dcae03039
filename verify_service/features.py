"""Features: inputs of some of the target's layers, sent with the tokens to a draft that reads them (EAGLE-3,
MTP).

The row of a token holds the layers' inputs at the token before it, from which it was chosen. So a verdict has
a row for each of its tokens, and a text that is computed at the opening has a row for each token but the
first. Tokens whose keys and values come from an earlier session are not computed again, and have no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.engine.features import to_bytes
from outrider.protocol.allowance import MAX_FEATURE_BYTES, row_bytes
from outrider.protocol.messages import PromptFeatures
from verify_service.scheduler import Work


def layers_of(works: Sequence[Work]) -> tuple[int, ...]:
    """Return the layers whose features any session of a step wants, in rising order."""
    wanted = [work.session.feature_layers for work in works if featured(work)]
    return tuple(sorted({layer for layers in wanted for layer in layers}))


def featured(work: Work) -> range:
    """Return the tokens of a work whose rows may be sent: the committed tokens whose rows were not sent yet
    (only the last ones if they do not fit into a message), and all candidates."""
    session = work.session
    if not session.feature_layers or session.kv is None:
        return range(0)
    first = max(session.features_sent, session.tree.committed_length - _most_rows(work)) - session.kv.length
    if not work.completes:
        return range(min(max(first, 0), work.chain), work.chain)
    return range(min(max(first, 0), work.chain - 1), work.tokens)


class StepFeatures:
    """The rows that a step has taken. `taken` has [F, C] by layer; F counts the `featured` of all works."""

    def __init__(self, works: Sequence[Work], taken: Mapping[int, Tensor]) -> None:
        self._taken = taken
        self._starts: dict[int, int] = {}
        """The first row of each session."""
        self._featured = {work.session.id: featured(work) for work in works}
        start = 0
        for work in works:
            self._starts[work.session.id] = start
            start += len(self._featured[work.session.id])

    def prompt(self, work: Work) -> PromptFeatures | None:
        """Return features of the text that a work computes before its last token; None where none are wanted.

        Call it before the commit.
        """
        session, featured_rows = work.session, self._featured[work.session.id]
        stop = work.chain - 1 if work.completes else work.chain
        if session.kv is None or not featured_rows or featured_rows.start >= stop:
            return None
        rows = range(featured_rows.start, stop)
        position = session.kv.length + featured_rows.start + 1
        session.features_sent = session.kv.length + stop
        return PromptFeatures(position, self._bytes(work, rows))

    def verdict(self, work: Work, path: Sequence[int]) -> bytes:
        """Return features of the tokens that a step commits; empty when the session wants none.

        Call it after the commit.

        `path` are the rows that the tokens were chosen at: 0 for the last committed token, 1 + i for node i.
        """
        if not self._featured[work.session.id]:
            return b""
        work.session.features_sent = work.session.tree.committed_length - 1
        kept = path[-_most_rows(work) :]
        return self._bytes(work, [work.chain - 1 + row for row in kept])

    def _bytes(self, work: Work, tokens: Sequence[int]) -> bytes:
        first = self._starts[work.session.id] - self._featured[work.session.id].start
        rows = [first + token for token in tokens]
        return to_bytes(torch.cat([self._taken[layer][rows] for layer in work.session.feature_layers], -1))


def _most_rows(work: Work) -> int:
    """Return how many rows fit into a message."""
    session = work.session
    return max(MAX_FEATURE_BYTES // row_bytes(len(session.feature_layers), session.limits.hidden_size), 1)
