"""The draft streams of one session, as far as they concern each other. Pure.

A session may have several: of different kinds, or of several replicas. Each has node ids of its own, so the
verify side knows which draft said what. The target's turn has come when every draft that owes a block has
said ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.candidates import CheckedIds
from outrider.protocol.allowance import BLOCKS, NODES, Allowance
from outrider.protocol.messages import TokenBlock


@dataclass(slots=True)
class DraftStream:
    """One draft stream; it may not be open yet. Times in seconds."""

    stream: int
    ids: CheckedIds
    opened: bool = False
    endpoint: str = ""
    """Of its replica, once it is open."""
    may_be_silent: bool = False
    last_block_at: float = 0.0
    verdicts_since_block: int = 0
    has_sent: bool = False
    wanted_at: float = 0.0
    """When the verify replica last said that it wants one."""
    ready: bool = False
    """It has said so since the last verdict."""
    late: bool = False
    """It let a whole round pass without a word, and is not waited for until it says ready again."""
    told: bool = False
    """It was open when the last verdict came."""
    allowance: Allowance = field(default_factory=Allowance)
    share: Allowance = field(default_factory=Allowance)
    """What may still be passed on before the next verdict, where there are others."""

    @property
    def owes(self) -> bool:
        """True while others wait for it to say ready."""
        return self.opened and not (self.ready or self.late or self.may_be_silent)

    def verdict(self, drafts: int) -> None:
        """A verdict came: this one of so many drafts may send more."""
        self.late = self.told and not self.ready
        self.told = self.opened
        self.ready = False
        self.allowance.refill()
        self.share = Allowance(BLOCKS // drafts, NODES // drafts)

    def block(self, block: TokenBlock, now: float) -> None:
        """It sent a sound block."""
        self.last_block_at = now
        self.verdicts_since_block = 0
        self.has_sent = True
        self.ready = self.ready or block.ready
        self.late = self.late and not block.ready


def all_ready(streams: Iterable[DraftStream]) -> bool:
    """True when some draft has said ready, and none owes a block any more."""
    found = list(streams)
    return any(draft.ready for draft in found) and not any(draft.owes for draft in found)
