"""Decides which of the drafts' blocks go to the verify replica, and when. Pure.

Blocks go at once. In sequential mode they wait for the target's turn, when all drafts that owe a block have
sent one marked ready. Every verify replica that opens gets the recent blocks again, as far as they are still
below the last committed token. So drafts need not know that a replica was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from orchestrator.candidates import MAX_BLOCKS, empty_ready, live_blocks
from orchestrator.events import SendBlock
from orchestrator.streams import DraftStream, VerifyStream, all_ready
from outrider.protocol.messages import TokenBlock


@dataclass(slots=True)
class Proposals:
    """The blocks of one session. `drafts` are its present draft streams, `length` its committed tokens.

    Blocks are sent as far as the verify replica has room for them. The rest may be lost: blocks
    are only proposals.
    """

    sequential: bool
    _held: deque[TokenBlock] = field(default_factory=lambda: deque(maxlen=MAX_BLOCKS))
    """In sequential mode, blocks that wait for one marked ready."""
    _recent: deque[TokenBlock] = field(default_factory=lambda: deque(maxlen=MAX_BLOCKS))

    def verify_opened(
        self, verify: VerifyStream, committed: list[int], drafts: Collection[DraftStream]
    ) -> list[SendBlock]:
        """A verify replica opened: send it the nodes that are still alive."""
        self._held.clear()  # `_recent` has them too
        live = _send(live_blocks(committed, self._recent, all_ready(drafts)), verify)
        return live + self.nudge(verify, len(committed), drafts)

    def add(self, block: TokenBlock, verify: VerifyStream | None) -> list[SendBlock]:
        """A draft sent a block: send it on, or hold it in sequential mode."""
        self._recent.append(block)
        if verify is None or not verify.opened:
            return []
        if not self.sequential:
            return _send([block], verify)
        self._held.append(block)
        return self._send_held(verify) if block.ready else []

    def nudge(
        self, verify: VerifyStream | None, length: int, drafts: Collection[DraftStream]
    ) -> list[SendBlock]:
        """In sequential mode without a draft, send an empty ready block: the target's turn has come."""
        alone = not any(draft.opened for draft in drafts)
        if not self.sequential or not alone or verify is None or not verify.opened:
            return []
        return _send([empty_ready(length)], verify)

    def draft_lost(
        self, lost: DraftStream, verify: VerifyStream | None, length: int, drafts: Collection[DraftStream]
    ) -> list[SendBlock]:
        """A draft is gone: send the blocks that waited only for it."""
        if not any(draft.opened for draft in drafts):
            self._held.clear()
            return self.nudge(verify, length, drafts)
        waited = self.sequential and lost.owes and all_ready(drafts)
        if not waited or verify is None or not verify.opened:
            return []
        self._held.append(empty_ready(length))
        return self._send_held(verify)

    def _send_held(self, verify: VerifyStream) -> list[SendBlock]:
        blocks = [*self._held]
        self._held.clear()
        return _send(blocks, verify)


def _send(blocks: Sequence[TokenBlock], verify: VerifyStream) -> list[SendBlock]:
    return [SendBlock(block) for block in blocks if verify.room.spend(len(block))]
