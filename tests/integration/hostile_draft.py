"""A draft service that lies: a real gRPC server whose blocks are wrong in every way we could think of.

Which attack a session gets is the `task` label of its request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grpc

from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, session_pb2
from outrider.v1 import tokens_pb2

HUGE = 5000
"""Nodes of a block above every limit."""


def block(first_id: int, parents: list[int], tokens: list[int], **fields: Any) -> session_pb2.TokenBlock:
    """A ready block whose acceptances claim near certainty."""
    fields = {"ready": True, "acceptances": [0.99] * len(tokens), **fields}
    return session_pb2.TokenBlock(first_id=first_id, parents=parents, tokens=tokens, **fields)


class Target:
    """What an attack knows: committed length, next free node id, vocabulary size."""

    def __init__(self, open_message: draft_pb2.OpenDraft, vocabulary_size: int) -> None:
        self.length = len(open_message.token_ids)
        self.next_id = open_message.first_node_id
        self.vocabulary_size = vocabulary_size
        self.random = Random(7)

    def ids(self, count: int) -> int:
        """Reserve consecutive node ids; the first of them."""
        first = self.next_id
        self.next_id += count
        return first

    def tokens(self, count: int) -> list[int]:
        """Random tokens of the vocabulary."""
        return [self.random.randrange(self.vocabulary_size) for _ in range(count)]


def random_chain(t: Target) -> list[session_pb2.TokenBlock]:
    """Valid, and almost always wrong."""
    first = t.ids(8)
    return [block(first, [-t.length, *range(first, first + 7)], t.tokens(8))]


def outside_vocabulary(t: Target) -> list[session_pb2.TokenBlock]:
    """Token ids that the target does not have."""
    return [block(t.ids(3), [-t.length] * 3, [t.vocabulary_size, t.vocabulary_size + 1, 2**32 - 1])]


def stale_anchors(t: Target) -> list[session_pb2.TokenBlock]:
    """Parents that were committed long ago."""
    return [block(t.ids(4), [-1, -max(1, t.length - 3), -max(1, t.length - 1), -1], t.tokens(4))]


def future_anchors(t: Target) -> list[session_pb2.TokenBlock]:
    """Parents that are not committed yet."""
    return [block(t.ids(3), [-(t.length + 1), -(t.length + 100), -(2**62)], t.tokens(3))]


def unknown_parents(t: Target) -> list[session_pb2.TokenBlock]:
    """Parents that never existed, come later, or are the node itself."""
    first = t.ids(3)
    return [block(first, [first, first + 2, 2**61], t.tokens(3))]


def duplicate_ids(t: Target) -> list[session_pb2.TokenBlock]:
    """The same ids twice, with other tokens."""
    first = t.ids(3)
    return [block(first, [-t.length] * 3, t.tokens(3)), block(first, [-t.length] * 3, t.tokens(3))]


def shrinking_ids(t: Target) -> list[session_pb2.TokenBlock]:
    """Ids that go down."""
    first = t.ids(20)
    return [block(first + 10, [-t.length], t.tokens(1)), block(first, [-t.length], t.tokens(1))]


def same_token(t: Target) -> list[session_pb2.TokenBlock]:
    """One token many times below one parent."""
    return [block(t.ids(6), [-t.length] * 6, t.tokens(1) * 6)]


def unequal_columns(t: Target) -> list[session_pb2.TokenBlock]:
    """More tokens than parents, and fewer acceptances."""
    return [block(t.ids(4), [-t.length] * 2, t.tokens(4), acceptances=[0.5])]


def huge_block(t: Target) -> list[session_pb2.TokenBlock]:
    """More nodes than any tree may have."""
    first = t.ids(HUGE)
    return [block(first, [-t.length, *range(first, first + HUGE - 1)], t.tokens(HUGE))]


def flood(t: Target) -> list[session_pb2.TokenBlock]:
    """Many valid blocks at once."""
    return [one for _ in range(50) for one in random_chain(t)]


def flood_of_old(t: Target) -> list[session_pb2.TokenBlock]:
    """Hundreds of blocks of one node at a position that was committed long ago."""
    return [block(t.ids(1), [-1], t.tokens(1)) for _ in range(500)]


def flood_of_large(t: Target) -> list[session_pb2.TokenBlock]:
    """More of the largest blocks there may be than fit between two verdicts."""
    return [block(t.ids(1024), [-t.length] * 1024, t.tokens(1024)) for _ in range(10)]


def not_a_number(t: Target) -> list[session_pb2.TokenBlock]:
    """Acceptances that are no numbers."""
    wrong = [float("nan"), float("inf"), float("-inf")]
    return [block(t.ids(3), [-t.length] * 3, t.tokens(3), acceptances=wrong)]


def out_of_range_acceptances(t: Target) -> list[session_pb2.TokenBlock]:
    """Acceptances far outside 0 to 1."""
    return [block(t.ids(3), [-t.length] * 3, t.tokens(3), acceptances=[-5.0, 1e30, 2.0])]


def largest_numbers(t: Target) -> list[session_pb2.TokenBlock]:
    """Every number at the end of its range."""
    nasty = {"base_length": 2**32 - 1, "expand_start_unix_nano": 2**64 - 1, "expand_micros": 2**32 - 1}
    return [block(2**64 - 2, [-(2**63), 2**63 - 1], t.tokens(2), **nasty)]


def wrong_base(t: Target) -> list[session_pb2.TokenBlock]:
    """A base length and a trace context that are nonsense."""
    return [block(t.ids(2), [-t.length] * 2, t.tokens(2), base_length=10**9, traceparent="no trace")]


def empty_block(t: Target) -> list[session_pb2.TokenBlock]:
    """Ready, with nothing in it."""
    return [block(t.ids(0), [], [])]


def never_ready(t: Target) -> list[session_pb2.TokenBlock]:
    """Right shape, but the ready mark never comes."""
    return [block(t.ids(2), [-t.length] * 2, t.tokens(2), ready=False)]


def silent(_: Target) -> list[session_pb2.TokenBlock]:
    """Nothing at all."""
    return []


Attack = Callable[[Target], list[session_pb2.TokenBlock]]

ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        random_chain, outside_vocabulary, stale_anchors, future_anchors, unknown_parents, duplicate_ids,
        shrinking_ids, same_token, unequal_columns, huge_block, flood, flood_of_old, flood_of_large,
        not_a_number, out_of_range_acceptances, largest_numbers, wrong_base, empty_block, never_ready, silent,
    )
}  # fmt: skip

PROTOCOL_ATTACKS = ("opens_never", "opens_twice", "says_nothing_new", "fails", "ends")
"""Attacks on the stream instead of the blocks."""


class HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each open and verdict with the blocks of the session's attack."""

    def __init__(self, info: tokens_pb2.ModelInfo) -> None:
        self.info = tokens_pb2.ModelInfo()
        self.info.CopyFrom(info)
        self.info.replica, self.info.incarnation, self.info.kind = "hostile", "hostile-1", "model"
        self.sessions: dict[str, int] = {}
        """Sessions opened, by attack."""

    def GetModelInfo(self, _request: Any, _context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Claims to fit the target."""
        return draft_pb2.DraftServiceGetModelInfoResponse(info=self.info)

    def Draft(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """One session under attack."""
        opening = next(requests).open
        self.sessions[opening.task] = self.sessions.get(opening.task, 0) + 1
        if opening.task in PROTOCOL_ATTACKS:
            yield from self._attack_protocol(opening.task, requests, context)
            return
        target = Target(opening, self.info.vocabulary_size)
        attack = ATTACKS[opening.task]
        yield self._opened()
        yield from _responses(attack(target), target.length)
        for request in requests:
            if request.WhichOneof("message") != "verdict":
                return
            target.length = request.verdict.base_length + len(request.verdict.tokens)
            yield from _responses(attack(target), target.length)

    def _opened(self) -> draft_pb2.DraftResponse:
        return draft_pb2.DraftResponse(
            opened=draft_pb2.DraftOpened(replica="hostile", incarnation="hostile-1")
        )

    def _attack_protocol(
        self, attack: str, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.DraftResponse]:
        if attack == "opens_never":
            while context.is_active():
                time.sleep(0.02)
            return
        yield self._opened()
        if attack == "opens_twice":
            yield self._opened()
        next(requests, None)
        if attack == "says_nothing_new":
            yield draft_pb2.DraftResponse()
        if attack == "fails":
            context.abort(grpc.StatusCode.INTERNAL, "out of luck")
        if attack != "ends":
            for _ in requests:
                pass


def _responses(blocks: list[session_pb2.TokenBlock], length: int) -> Iterator[draft_pb2.DraftResponse]:
    """For so many committed tokens, unless a block itself says for how many it is."""
    for one in blocks:
        one.base_length = one.base_length or length
        yield draft_pb2.DraftResponse(block=one)
