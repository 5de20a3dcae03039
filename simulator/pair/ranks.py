"""Ranks a draft's candidates at every position of a target's texts: all that scheduling learns of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.sampling.chooser import Ranking, SamplingRow, rank
from outrider.sampling.history import History
from outrider.speculation.acceptance import SharpnessFit
from simulator.pair.models import CHUNK, read
from simulator.pair.texts import Text
from simulator.traces import CANDIDATES, Trace


def rank_texts(draft: ModelRunner, texts: Sequence[Text]) -> list[Trace]:
    """One trace per text, ranked with the sharpness that fits them all."""
    fit = SharpnessFit()
    for text in texts:
        if not text.params.greedy:
            for ranking, token in zip(_rank(draft, text, 1.0), text.tokens, strict=True):
                fit.observe(ranking.winners, token)
    return [
        Trace.of(text.prompt, text.tokens, text.params.seed, list(_rank(draft, text, fit.value)))
        for text in texts
    ]


def without_guesses(texts: Sequence[Text]) -> list[Trace]:
    """The traces for drafts without a model, or for runs without drafts."""
    return [Trace(text.prompt, text.tokens, text.params.seed, ()) for text in texts]


def _rank(draft: ModelRunner, text: Text, sharpness: float) -> Iterator[Ranking]:
    """The draft's ranking at every position of a text, given all tokens before it."""
    kv = SequenceKv.open(draft.pool, [])
    read(draft, kv, text.prompt[:-1])
    fed = [text.prompt[-1], *text.tokens[:-1]]
    for start in range(0, len(fed), CHUNK):
        piece = fed[start : start + CHUNK]
        logits = draft.forward([Segment(kv, piece, None, range(len(piece)))])
        draft.commit(kv, range(len(piece)), piece)
        first = len(text.prompt) + start
        rows = [
            SamplingRow(text.params, at, at - len(text.prompt), History(text.prompt))
            for at in range(first, first + len(piece))
        ]
        yield from rank(logits, rows, CANDIDATES, sharpness, ())
    kv.release()
