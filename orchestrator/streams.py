"""What a session knows of its streams: one to a verify replica, some to drafts, and those it lost. Pure.

A session may have several drafts, of different kinds or on several replicas. Each uses node ids of its own,
so the verify side knows which draft proposed a node. In sequential mode the target's turn comes when every
draft that owes a block has sent one marked ready.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from orchestrator.candidates import BlockCheck
from outrider.protocol.allowance import BLOCKS, NODES, Allowance
from outrider.protocol.errors import Draining, InternalError, OutriderError, Overloaded
from outrider.protocol.messages import PromptFeatures

DRAFT_RETRY_SECONDS = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Seconds to wait after the first, second, ... draft lost in a row without a block; the last repeats."""
VERIFY_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds to wait after the first, second, ... verify replica lost in a row without a verdict."""


@dataclass(slots=True)
class VerifyStream:
    """The verify stream; it may not be open yet."""

    stream: int
    opened: bool = False
    endpoint: str = ""
    """Endpoint of its replica, once one has opened the stream or has failed."""
    room: Allowance = field(default_factory=Allowance.full)
    """Blocks and nodes that the replica takes before its next verdict. It ends a stream that sends more."""
    features_to: int = 0
    """Position up to which features have come."""

    def takes(self, part: PromptFeatures, length: int) -> bool:
        """Note features of a text of `length` tokens; return False when they do not follow the last ones."""
        if not self.opened or not self.features_to < part.position <= length:
            return False
        self.features_to = part.position
        return True


@dataclass(slots=True)
class DraftStream:
    """One draft stream; it may not be open yet. Times in seconds."""

    stream: int
    check: BlockCheck
    opened: bool = False
    endpoint: str = ""
    """Endpoint of its replica, once one has opened the stream or has failed."""
    may_be_silent: bool = False
    last_block_at: float = 0.0
    verdicts_since_block: int = 0
    has_sent: bool = False
    wanted_at: float = 0.0
    """When the verify replica last said that it wants a draft."""
    ready: bool = False
    """True when a block marked ready came since the last verdict."""
    late: bool = False
    """True when it sent no ready block between two verdicts. Until it sends one, nothing waits for it."""
    heard_verdict: bool = False
    """True when it was open when the last verdict came."""
    share: Allowance = field(default_factory=Allowance)
    """Blocks and nodes that are still passed on to the verify replica if there are other drafts."""

    @property
    def owes(self) -> bool:
        """True while the session waits for its ready block."""
        return self.opened and not (self.ready or self.late or self.may_be_silent)

    def verdict(self, drafts: int) -> None:
        """A verdict came: this draft, one of `drafts`, may send more."""
        self.late = self.heard_verdict and not self.ready
        self.heard_verdict = self.opened
        self.ready = False
        self.check.allowance.refill()
        self.share = Allowance(BLOCKS // drafts, NODES // drafts)

    def block(self, ready: bool, now: float) -> None:
        """A sound block came; `ready`: it is marked ready, and its draft knew the last verdict."""
        self.last_block_at = now
        self.verdicts_since_block = 0
        self.has_sent = True
        self.ready = self.ready or ready
        self.late = self.late and not ready


@dataclass(slots=True)
class Losses:
    """Replicas of one kind that were lost in a row. Times in seconds."""

    count: int = 0
    internal: int = 0
    """Number of them that were lost by an internal error."""
    broken: int = 0
    """Number of them that were lost after they had opened, and did not drain."""
    retry_at: float = 0.0

    def add(self, error: OutriderError, opened: bool, now: float, waits: Sequence[float]) -> None:
        """Count one more loss; `waits` are the seconds to wait after the first, second, ... loss."""
        self.internal += isinstance(error, InternalError)
        self.broken += opened and not isinstance(error, Draining)
        asked = (error.retry_after or 0.0) if isinstance(error, Overloaded) and self.count else 0.0
        self.retry_at = now + max(waits[min(self.count, len(waits) - 1)], asked)
        self.count += 1


def all_ready(streams: Collection[DraftStream]) -> bool:
    """True when at least one draft is ready, and none owes a block."""
    return any(draft.ready for draft in streams) and not any(draft.owes for draft in streams)
