"""Checks constraints before a request waits for a place; remembers those that are sound."""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.request.resolver import IncomingRequest
from orchestrator.text.constraint_check import ConstraintCheck
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizing import Tokenizing
from outrider.protocol.messages import ModelInfo

MAX_REMEMBERED = 4096
"""Digests of 32 bytes."""


class Constraints:
    """Asks a process of its own: no prompt waits behind a grammar."""

    def __init__(self, process: Tokenizing) -> None:
        self._process = process
        self._sound: OrderedDict[bytes, None] = OrderedDict()

    async def complete(self, incoming: IncomingRequest, tokenizer: TextTokenizer, served: ModelInfo) -> bool:
        """Whether the resumed tokens of a request are all that its constraint allows.

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
        self._remember(digest)
        return complete

    def _remember(self, digest: bytes) -> None:
        self._sound[digest] = None
        if len(self._sound) > MAX_REMEMBERED:
            self._sound.popitem(last=False)
