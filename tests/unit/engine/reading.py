"""Reads texts in many ways and compares the bits with those of one token at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner, Segment

VOCABULARY = 300


@dataclass(frozen=True, slots=True)
class Target:
    """A model, some texts, and what it computes for them token by token."""

    loaded: LoadedModel
    texts: list[list[int]]
    alone: list[torch.Tensor]
    """[T, V] logits of each text."""


def token_by_token(runner: ModelRunner, text: list[int], chunk: int = 0) -> torch.Tensor:
    """[T, V] logits; the first tokens may be one chunk."""
    kv = SequenceKv.open(runner.pool, [])
    rows = []
    for piece in filter(None, (text[:chunk], *([token] for token in text[chunk:]))):
        rows.append(runner.forward([Segment(kv, piece, None, range(len(piece)))]))
        runner.commit(kv, range(len(piece)), piece)
    kv.release()
    return torch.cat(rows)


class Reader:
    """Reads one text in random pieces: chunks, or trees that hold its next tokens among others."""

    def __init__(self, runner: ModelRunner, text: list[int], alone: torch.Tensor, rng: random.Random) -> None:
        self.runner, self.text, self.alone, self.rng = runner, text, alone, rng
        self.kv = SequenceKv.open(runner.pool, text)
        self.path: list[int] = []
        """Offsets of the text's own tokens in the piece."""

    @property
    def done(self) -> bool:
        """The whole text is committed."""
        return self.kv.length == len(self.text)

    def piece(self) -> Segment:
        """The next tokens, perhaps with others."""
        size = self.rng.choice([1, 1, 2, 3, 5, 9, 20, 90])
        tokens = self.text[self.kv.length :][:size]
        if size > 9 or self.rng.random() < 0.4:
            self.path = list(range(len(tokens)))
            return Segment(self.kv, tokens, None, self.path)
        nodes: list[int] = []
        parents: list[int] = []
        self.path = []
        for token in tokens:
            for _ in range(self.rng.randrange(3)):
                nodes.append(self.rng.randrange(VOCABULARY))
                parents.append(self.rng.randrange(-1, len(nodes) - 1))
            nodes.append(token)
            parents.append(self.path[-1] if self.path else -1)
            self.path.append(len(nodes) - 1)
        return Segment(self.kv, nodes, parents, self.path)

    def check_and_commit(self, logits: torch.Tensor) -> None:
        """Compare the rows [path, V] bit for bit, keep some of the path, throw the rest away."""
        start = self.kv.length
        assert torch.equal(logits, self.alone[start : start + len(self.path)]), f"from token {start} on"
        keep = self.path[: self.rng.randint(1, len(self.path))]
        self.runner.commit(self.kv, keep, self.text[start : start + len(keep)])


def read_all(target: Target, runner: ModelRunner, seed: int) -> None:
    """All texts in random pieces side by side; the second finds the beginning of the first in the cache."""
    rng = random.Random(seed)
    readers: list[Reader] = []
    waiting = list(zip(target.texts, target.alone, strict=True))
    while waiting or any(not reader.done for reader in readers):
        if waiting and (not readers or rng.random() < 0.2):
            readers.append(Reader(runner, *waiting.pop(0), rng))
        running = [reader for reader in readers if not reader.done and rng.random() < 0.8]
        pieces = [reader.piece() for reader in running]
        logits = runner.forward(pieces) if pieces else torch.empty(0)
        parts = torch.split(logits, [len(piece.wanted) for piece in pieces]) if pieces else ()
        for reader, part in zip(running, parts, strict=True):
            reader.check_and_commit(part)
