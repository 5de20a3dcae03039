"""The jobs of a tokenizer. They can be done here or, pickled, in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.text.constraint_check import TOKEN_BYTES, ConstraintCheck
from orchestrator.text.conversation import Conversation
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import ContextTooLong

INLINE_BYTES = 4096
"""Largest job that is done on the event loop: about 2 ms, at most 5."""


class _Sized:
    """A job with a size. A small one is quick enough for the event loop."""

    __slots__ = ()
    over_bounds = "takes more time or memory to tokenize than a prompt may; shorten it"
    """The error for a job that made its process end."""

    @property
    def size(self) -> int:
        """Bytes that the job counts in the queue."""
        raise NotImplementedError

    @property
    def is_quick(self) -> bool:
        """Whether the job may be done on the event loop."""
        return self.size <= INLINE_BYTES


@dataclass(frozen=True, slots=True)
class TextPrompt(_Sized):
    """Plain text whose token ids are wanted."""

    text: str
    special_tokens: bool = True
    field: str = "text"
    """The field of the request that has the text."""

    @property
    def size(self) -> int:
        """Bytes that the job counts in the queue."""
        return len(self.text.encode())

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode`."""
        return tokenizer.encode(self.text, positions, self.special_tokens)


@dataclass(frozen=True, slots=True)
class ChatPrompt(_Sized):
    """A conversation whose token ids are wanted."""

    chat: Conversation
    special_tokens: bool = False
    field = "chat.messages"

    @property
    def size(self) -> int:
        """Bytes that the job counts in the queue."""
        return self.chat.size

    @property
    def is_quick(self) -> bool:
        """Whether the job may be done on the event loop."""
        return self.chat.is_plain and self.size <= INLINE_BYTES

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode_chat`."""
        return tokenizer.encode_chat(self.chat, positions, self.special_tokens)


@dataclass(frozen=True, slots=True)
class Ids(_Sized):
    """Token ids whose text is wanted."""

    ids: tuple[int, ...]
    special_tokens: bool = False
    field = "token_ids"

    @property
    def size(self) -> int:
        """Bytes that the job counts in the queue."""
        return TOKEN_BYTES * len(self.ids)

    def text(self, tokenizer: TextTokenizer) -> str:
        """See `TextTokenizer.decode`."""
        return tokenizer.decode(self.ids, self.special_tokens)


Prompt: TypeAlias = TextPrompt | ChatPrompt
Job: TypeAlias = Prompt | Ids | ConstraintCheck


def too_long(field: str, length: str, positions: int) -> ContextTooLong:
    """The error for a text that is longer than `positions` tokens."""
    return ContextTooLong(field, f"{length} do not fit: {limit_of(positions)}; shorten it")


def limit_of(positions: int) -> str:
    """The limit as OpenAI's API words it: LiteLLM recognises a prompt that is too long by this phrase."""
    return f"this model's maximum context length is {positions} tokens"
