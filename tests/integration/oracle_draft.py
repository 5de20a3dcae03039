"""A draft service that knows the future and tells it with mistakes: every path through a tree gets walked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import grpc

from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, session_pb2
from outrider.v1 import tokens_pb2

AHEAD = 6
"""Depth of the trees."""
MISTAKES = 0.25
"""Share of positions whose right token is left out."""


class OracleDraft(draft_pb2_grpc.DraftServiceServicer):
    """Proposes the known continuation of a prompt among wrong siblings; unknown prompts get nothing."""

    def __init__(self, info: tokens_pb2.ModelInfo) -> None:
        self.info = tokens_pb2.ModelInfo()
        self.info.CopyFrom(info)
        self.info.replica, self.info.incarnation, self.info.kind = "oracle", "oracle-1", "model"
        self.sequences: dict[tuple[int, ...], list[int]] = {}
        """Prompt -> prompt and continuation."""

    def learn(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> None:
        """Know what follows each prompt."""
        pairs = zip(prompts, continuations, strict=True)
        self.sequences = {tuple(prompt): [*prompt, *rest] for prompt, rest in pairs}

    def GetModelInfo(self, _request: Any, _context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Fits the target."""
        return draft_pb2.DraftServiceGetModelInfoResponse(info=self.info)

    def Draft(self, requests: Iterator[Any], _context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """One session: a fresh tree after the opening and after every verdict."""
        opening = next(requests).open
        sequence = self.sequences.get(tuple(opening.token_ids[: opening.prompt_length]), [])
        next_id = opening.first_node_id
        yield draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(replica="oracle", incarnation="oracle-1"))
        length = len(opening.token_ids)
        while True:
            block = self._tree(sequence, length, next_id)
            next_id += len(block.tokens)
            yield draft_pb2.DraftResponse(block=block)
            request = next(requests, None)
            if request is None or request.WhichOneof("message") != "verdict":
                return
            length = request.verdict.base_length + len(request.verdict.tokens)

    def _tree(self, sequence: list[int], length: int, first_id: int) -> session_pb2.TokenBlock:
        """The right chain below `length`, a wrong sibling at every depth, and a child below each sibling."""
        random = Random(length)
        parents, tokens = [], []
        parent = -length
        for truth in sequence[length : length + AHEAD]:
            wrong = random.randrange(self.info.vocabulary_size)
            right = truth if random.random() > MISTAKES else random.randrange(self.info.vocabulary_size)
            here = first_id + len(tokens)
            parents += [parent, parent, here]
            tokens += [wrong, right, random.randrange(self.info.vocabulary_size)]
            parent = here + 1
        return session_pb2.TokenBlock(
            first_id=first_id,
            parents=parents,
            tokens=tokens,
            acceptances=[0.9] * len(tokens),
            ready=True,
            base_length=length,
        )
