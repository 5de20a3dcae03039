"""Checks constraints before a request waits for a place, and remembers sound ones."""

from __future__ import annotations

from orchestrator.request.resolver import IncomingRequest
from orchestrator.text.constraint_check import ConstraintCheck
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizing import Tokenizing
from outrider.protocol.messages import ModelInfo
from outrider.recent import Recent

MAX_REMEMBERED = 4096
"""Most constraints that are remembered, by digests of 32 bytes."""


class Constraints:
    """Checks constraints in a process of its own, so that no prompt waits for a grammar."""

    def __init__(self, process: Tokenizing) -> None:
        self._process = process
        self._sound = Recent[bytes, None](MAX_REMEMBERED)

    async def complete(self, incoming: IncomingRequest, tokenizer: TextTokenizer, served: ModelInfo) -> bool:
        """Whether a request's resumed tokens are complete: its constraint allows nothing after them.

        Raises:
            InvalidRequest: the constraint is wrong or too costly, or a resumed token does not follow it.
            Overloaded: too much waits already.
            Unavailable: the process ended twice, or cannot be started.
        """
        constraint, resumed = incoming.sampling.constraint, incoming.resume_token_ids
        if constraint is None:
            return False
        digest = constraint.digest
        if not resumed and digest in self._sound:
            self._sound.move_to_end(digest)
            return False
        check = ConstraintCheck(constraint, resumed, served.eos_token_ids)
        complete = await self._process.checked(check, tokenizer, served.context_length)
        self._sound[digest] = None
        return complete
