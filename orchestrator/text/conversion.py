"""Converts texts to token ids and back: short ones on the event loop, long ones in another process."""

from __future__ import annotations

from orchestrator.text.jobs import Ids, Prompt, too_long
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizing import Tokenizing
from outrider.protocol.errors import InvalidRequest


class Conversion:
    """Converts short texts on the event loop; `tokenizing` converts long ones."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing

    async def tokens(
        self, prompt: Prompt, tokenizer: TextTokenizer | None, positions: int
    ) -> tuple[int, ...]:
        """Token ids of a text or conversation, at most `positions`.

        Raises:
            ContextTooLong: there are more than `positions`.
            InvalidRequest: there is no tokenizer, it takes too much time or memory, or the chat template
                refuses it.
            Overloaded: too many jobs wait already.
            Unavailable: the other process ended twice, or cannot be started.
        """
        used = _needed(tokenizer, prompt.field)
        if not prompt.is_quick:
            return await self._tokenizing.tokens(prompt, used, positions)
        tokens = prompt.tokens(used)
        if len(tokens) > positions:
            raise too_long(prompt.field, f"{len(tokens)} tokens", positions)
        return tokens

    async def text(self, ids: Ids, tokenizer: TextTokenizer | None, positions: int) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: there is no tokenizer, or it takes too much time or memory.
            Overloaded, Unavailable: as above.
        """
        used = _needed(tokenizer, ids.field)
        if not ids.is_quick:
            return await self._tokenizing.text(ids, used, positions)
        return ids.text(used)


def _needed(tokenizer: TextTokenizer | None, field: str) -> TextTokenizer:
    if tokenizer is None:
        raise InvalidRequest(field, "the model came without a tokenizer: it takes only token ids")
    return tokenizer
