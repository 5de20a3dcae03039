"""Replicas that send without end, on real gRPC servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.internal.v1 import draft_pb2, verify_pb2
from outrider.protocol import wire
from outrider.protocol.messages import OpenDraft, Opened, StepTimes, TokenBlock, Verdict
from outrider.speculation.candidate_tree import CandidateTree
from tests.fakes import VOCABULARY, Context, FakeDraft, FakeVerify, _VerifySession, next_token

LARGEST = wire.MAX_BLOCK_NODES
HUGE = 8 << 20
"""Bytes of a message that no channel to a draft takes."""
Responses = Callable[[OpenDraft, int], draft_pb2.DraftResponse]
"""The flood's message number n."""


def opened(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """The session is open, again and again."""
    return draft_pb2.DraftResponse(opened=wire.opened_draft_to_pb(Opened("draft", "1", 0)))


def blank(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """Nothing at all."""
    return draft_pb2.DraftResponse()


def huge(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """The session is open, in one huge message."""
    return draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(replica="x" * HUGE))


def old_nodes(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """A valid block of one node that contradicts the prompt."""
    wrong = (opening.token_ids[1] + 1) % VOCABULARY
    block = TokenBlock(opening.first_node_id + number, (-1,), (wrong,), (0.9,), base_length=3)
    return draft_pb2.DraftResponse(block=wire.block_to_pb(block))


def new_nodes(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """A valid block of one node below the prompt."""
    block = TokenBlock(opening.first_node_id + number, (-3,), (number % VOCABULARY,), (0.9,), base_length=3)
    return draft_pb2.DraftResponse(block=wire.block_to_pb(block))


def large_blocks(opening: OpenDraft, number: int) -> draft_pb2.DraftResponse:
    """A valid chain of as many nodes as a block may have."""
    first = opening.first_node_id + number * LARGEST
    parents = (-3, *range(first, first + LARGEST - 1))
    block = TokenBlock(first, parents, (7,) * LARGEST, (0.99,) * LARGEST, ready=True, base_length=3)
    return draft_pb2.DraftResponse(block=wire.block_to_pb(block))


FLOODS: dict[str, Responses] = {
    flood.__name__: flood for flood in (opened, blank, huge, old_nodes, new_nodes, large_blocks)
}


class FloodingDraft(FakeDraft):
    """Opens a session and sends until its stream is cut, whatever comes; `sent` counts messages."""

    def __init__(self, flood: str) -> None:
        super().__init__()
        self.flood = FLOODS[flood]
        self.sent = 0

    async def Draft(self, requests: AsyncIterator[Any], context: Context) -> None:  # noqa: N802
        """See the proto."""
        opening = wire.open_draft_from_pb((await anext(aiter(requests))).open)
        self.openings.append(opening)
        self.enter()
        try:
            if self.flood is not huge:
                await context.write(opened(opening, 0))
            for number in range(1 << 30):
                await context.write(self.flood(opening, number))
                self.sent += 1
        finally:
            self.sessions -= 1


class FloodingVerify(FakeVerify):
    """A verify replica that goes wrong after its second verdict, without end: `flood` says how."""

    def __init__(self, flood: str) -> None:
        super().__init__()
        self.flood = flood
        """opened, blank, closed, empty (verdicts without tokens), ahead (of tokens beyond max_tokens), same
        (verdicts of one step), or many (tokens in one verdict)."""

    async def _steps(self, session: _VerifySession, context: Context) -> None:
        for step in (1, 2):
            verdict = self._step(session, session.opening.first_step + step)
            await context.write(verify_pb2.VerifyResponse(verdict=wire.verdict_to_pb(verdict)))
        tree = session.tree
        while True:
            await context.write(self._next(tree, session.opening.sampling.seed, verdict))

    def _next(self, tree: CandidateTree, seed: int, last: Verdict) -> verify_pb2.VerifyResponse:
        match self.flood:
            case "opened":
                opened = Opened("verify", self.info.incarnation, 0)
                return verify_pb2.VerifyResponse(opened=wire.opened_verify_to_pb(opened))
            case "closed":
                return verify_pb2.VerifyResponse(closed=verify_pb2.VerifyClosed())
            case "blank":
                return verify_pb2.VerifyResponse()
        count = {"empty": 0, "ahead": 1, "same": 1, "many": 10_000}[self.flood]
        base = tree.committed_length
        for _ in range(count):
            tree.commit([next_token(tree.committed, seed)])
        step = last.step if self.flood == "same" else last.step + base
        verdict = Verdict(step, base, tuple(tree.committed[base:]), times=StepTimes(forward_micros=100))
        return verify_pb2.VerifyResponse(verdict=wire.verdict_to_pb(verdict))
