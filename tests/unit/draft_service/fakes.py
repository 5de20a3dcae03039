"""Stand-ins for what the draft service works with."""

from __future__ import annotations

import itertools

from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from draft_service.drafters.base import Candidate, CandidateSource, PageCounts, Proposal
from draft_service.mailbox import Admitted, Close, Commit, Open
from draft_service.session import DraftLimits, DraftSession
from outrider.config import DraftConfig
from outrider.protocol.errors import OutOfPages
from outrider.protocol.messages import OpenDraft, SamplingParams, StepTimes, TokenBlock, Verdict
from outrider.rpc.queues import Outbox, Stream, deliver
from outrider.telemetry.instruments import DraftInstruments


def request(tokens=(1, 2, 3), **changes) -> OpenDraft:
    """An opening with sensible defaults."""
    fields = {"prompt_length": len(tokens), "sampling": SamplingParams(), "request_id": "r"} | changes
    return OpenDraft(token_ids=tuple(tokens), **fields)


def limits(**changes) -> DraftLimits:
    """Limits that do not bind."""
    fields = {"max_nodes": 64, "max_depth": 16, "context_length": 1000, "end_tokens": frozenset()} | changes
    return DraftLimits(**fields)


class FixedCalibration:
    """A candidate's bucket is its acceptance in percent."""

    sharpness = 1.0

    def __init__(self):
        self.observed = []
        self.winners = []

    def estimate(self, candidate):
        """The bucket, in percent."""
        return candidate.bucket / 100

    def observe(self, candidates, chosen):
        """Remember it."""
        self.observed.append(([candidate.token for candidate in candidates], chosen))

    def observe_winners(self, winners, chosen):
        """Remember it."""
        self.winners.append((winners, chosen))


class RankCalibration(FixedCalibration):
    """The first child has one acceptance, the others another."""

    def __init__(self, first, others):
        super().__init__()
        self._first, self._others = first, others

    def task(self, label):
        """The same for every task."""
        return self

    def estimate(self, candidate):
        """By the rank."""
        return self._first if candidate.rank == 0 else self._others


def likeliest(tree):
    """Children of the nodes on the likeliest path, from the root on."""
    level, found = tree.children, []
    while level:
        found.append([*level])
        level = next(iter(level.values())).children
    return found


def session(key=0, *, calibration=None, opening=None, **changes) -> DraftSession:
    """A session whose acceptances are what its proposals say."""
    opening = opening or request(pipelined=changes.pop("pipelined", True))
    return DraftSession(key, opening, limits(**changes), calibration or FixedCalibration())


def proposal(*percent_by_token, winners=()) -> Proposal:
    """Children as (token, acceptance in percent)."""
    return Proposal(
        [
            Candidate(token, CandidateSource.MODEL, percent, rank)
            for rank, (token, percent) in enumerate(percent_by_token)
        ],
        winners,
    )


def verdict(base, *tokens, step=1, **changes) -> Verdict:
    """A verdict of a target whose steps take 10 ms."""
    changes.setdefault("next_step_micros", 10_000)
    return Verdict(step, base, tokens, times=StepTimes(forward_micros=10_000), **changes)


class TableDrafter:
    """Proposes from a function of the whole path: (tokens so far) -> ((token, percent), ...).

    `room` is how many sequences hold memory at once; `slow` sequences need that many turns to prefill.
    """

    kind = "model"
    expands = True
    max_nodes = 1000
    context_length = 1000

    def __init__(self, children, *, room=1000, prefill_turns=1):
        self.children = children
        self.room = room
        self.prefill_turns = prefill_turns
        self.tokens = {}
        self.holding = {}
        self.batches = []
        self.recalls = {}

    def open(self, key, opening):
        """Start a sequence."""
        self.tokens[key] = list(opening.token_ids)
        return 0

    def recall(self, key):
        """What the test put there."""
        return self.recalls.get(key, Proposal(()))

    def expand(self, expansions):
        """Look the children up."""
        wanted = {expansion.key for expansion in expansions}
        if len(wanted | set(self.holding)) > self.room:
            raise OutOfPages("no pages")
        self.batches.append([(e.key, e.node.token if e.node else None) for e in expansions])
        return [self._proposal(expansion) for expansion in expansions]

    def _proposal(self, expansion):
        if expansion.node is None:
            self.holding[expansion.key] = self.holding.get(expansion.key, 0) + 1
            if self.holding[expansion.key] < self.prefill_turns:
                return None
        path = [node.token for node in expansion.node.path()] if expansion.node else []
        return proposal(*self.children((*self.tokens[expansion.key], *path)))

    def commit(self, key, tokens, rerooted):
        """Append tokens."""
        self.tokens[key].extend(tokens)

    def fits(self, key):
        """Whether one more sequence may hold memory."""
        return len(self.holding) < self.room

    def reset(self, key):
        """Give memory back."""
        self.holding.pop(key, None)

    def close(self, key):
        """End a sequence."""
        self.reset(key)
        del self.tokens[key]

    def pages(self):
        """One page per sequence."""
        return PageCounts(self.room, len(self.holding), 0)


class ListOutbox(Outbox):
    """An outbox that is read by the test itself."""

    def __init__(self, bound=1000):
        self.bound = bound
        self.blocks: list[TokenBlock] = []
        self.cached_length = None
        self.error = None

    @property
    def full(self):
        """True at the bound."""
        return len(self.blocks) >= self.bound

    def announce(self, event):
        """Remember it when it is delivered."""
        return self._receive, event

    def _receive(self, event):
        match event:
            case Admitted(cached_length):
                self.cached_length = cached_length
            case TokenBlock():
                self.blocks.append(event)
            case _:
                self.error = event

    def read(self):
        """Blocks since the last read."""
        blocks, self.blocks = self.blocks, []
        return blocks


class Bench:
    """A draft core turned by hand; messages wait for the next turn.

    Every look at the clock is one millisecond later.
    """

    def __init__(self, drafter, registry=None, **config):
        ticks = iter(range(10**9))
        self.clock = lambda: next(ticks) * 1e-3
        self.core = DraftCore(
            drafter,
            DraftConfig(**config),
            DraftInstruments(registry or CollectorRegistry()),
            deliver,
            clock=self.clock,
            wall_ns=lambda: 1_000,
        )
        self._ids = itertools.count(1)
        self._messages = []

    def open(self, opening, bound=1000, matcher=None):
        """A session; returns its stream and its outbox."""
        stream = Stream(next(self._ids), ListOutbox(bound))
        self._messages.append(Open(stream, opening, matcher))
        return stream, stream.outbox

    def verdict(self, stream, committed):
        """Tell a session what was committed."""
        self._messages.append(Commit(stream, committed, self.clock()))

    def close(self, stream):
        """End a session."""
        self._messages.append(Close(stream))

    def step(self):
        """One turn; returns False when nothing was worth expanding."""
        messages, self._messages = self._messages, []
        return self.core.turn(messages) is not None

    def run(self):
        """Turn until nothing is worth expanding."""
        turns = 0
        while self.step():
            turns += 1
            assert turns < 200, "the tree grows without end"

    def session(self, stream):
        """What the core knows of a session."""
        return self.core._entries[stream.id].session
