"""Converts texts to token ids and back: short ones on the event loop, long ones in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.text.jobs import Ids, Prompt
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizing import Tokenizing
from outrider.protocol.errors import ContextTooLong, DeadlineExceeded, InvalidRequest

_T = TypeVar("_T")


class Conversion:
    """Converts what is short on the event loop; `tokenizing` does the rest. `clock` tells the deadlines."""

    def __init__(self, tokenizing: Tokenizing, clock: Callable[[], float]) -> None:
        self._tokenizing = tokenizing
        self._clock = clock

    async def tokens(
        self, prompt: Prompt, tokenizer: TextTokenizer | None, positions: int, deadline: float
    ) -> tuple[int, ...]:
        """Token ids of a text or conversation; `positions` are those of the context.

        Raises:
            ContextTooLong: there are more than `positions`.
            InvalidRequest: there is no tokenizer, it takes too much time or memory, or the chat template
                refuses it.
            Overloaded: too much waits already.
            Unavailable: the other process ended twice, or cannot be started.
            DeadlineExceeded: the deadline passed.
        """
        used = _needed(tokenizer, prompt.field)
        if not prompt.is_quick:
            return await self._until(deadline, self._tokenizing.tokens(prompt, used, positions))
        tokens = prompt.tokens(used)
        if len(tokens) > positions:
            said = f"{len(tokens)} tokens do not fit the context of {positions}; shorten it"
            raise ContextTooLong(prompt.field, said)
        return tokens

    async def text(self, ids: Ids, tokenizer: TextTokenizer | None, positions: int, deadline: float) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: there is no tokenizer, or it takes too much time or memory.
            Overloaded, Unavailable, DeadlineExceeded: as above.
        """
        used = _needed(tokenizer, ids.field)
        if not ids.is_quick:
            return await self._until(deadline, self._tokenizing.text(ids, used, positions))
        return ids.text(used)

    async def _until(self, deadline: float, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None


def _needed(tokenizer: TextTokenizer | None, field: str) -> TextTokenizer:
    if tokenizer is None:
        raise InvalidRequest(field, "the model came without a tokenizer: it knows token ids alone")
    return tokenizer
