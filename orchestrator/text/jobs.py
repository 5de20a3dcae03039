"""The jobs of a tokenizer, which can be done here or, as plain data, in another process."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, TypeAlias

from orchestrator.text.constraint_check import KIND, ConstraintCheck, check_from
from orchestrator.text.conversation import Conversation, conversation_from
from orchestrator.text.tokenizer import TextTokenizer

ID_BYTES = 4
OVER_BOUNDS = "takes more time or memory to tokenize than a prompt may; shorten it"
"""What is said of a job that is the end of its process."""
INLINE_BYTES = 4096
"""What is no larger is done on the event loop: about 2 ms, at most 5."""

Plain: TypeAlias = tuple[Any, ...]
"""A kind, and values that `marshal` knows."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text whose token ids are wanted."""

    text: str
    special_tokens: bool = True
    field: str = "text"
    """The field of the request that has it."""
    over_bounds = OVER_BOUNDS

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return len(self.text.encode())

    @property
    def is_quick(self) -> bool:
        """Whether it may be done on the event loop."""
        return self.size <= INLINE_BYTES

    def plain(self) -> Plain:
        """For `job_from`."""
        return "text", self.text, self.special_tokens

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode`."""
        return tokenizer.encode(self.text, positions, self.special_tokens)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation whose token ids are wanted."""

    chat: Conversation
    special_tokens: bool = False
    over_bounds = OVER_BOUNDS

    @property
    def field(self) -> str:
        """The field of the request that has it."""
        return "chat.messages"

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return self.chat.size

    @property
    def is_quick(self) -> bool:
        """Whether it may be done on the event loop."""
        return self.chat.is_plain and self.size <= INLINE_BYTES

    def plain(self) -> Plain:
        """For `job_from`."""
        return "chat", self.chat.plain(), self.special_tokens

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode_chat`."""
        return tokenizer.encode_chat(self.chat, positions, self.special_tokens)


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids whose text is wanted."""

    ids: tuple[int, ...]
    special_tokens: bool = False
    over_bounds = OVER_BOUNDS

    @property
    def field(self) -> str:
        """The field of the request that has them."""
        return "token_ids"

    @property
    def size(self) -> int:
        """Bytes that they count."""
        return ID_BYTES * len(self.ids)

    @property
    def is_quick(self) -> bool:
        """Whether it may be done on the event loop."""
        return self.size <= INLINE_BYTES

    def plain(self) -> Plain:
        """For `job_from`."""
        return "ids", array("I", self.ids).tobytes(), self.special_tokens

    def text(self, tokenizer: TextTokenizer) -> str:
        """See `TextTokenizer.decode`."""
        return tokenizer.decode(self.ids, self.special_tokens)


Prompt: TypeAlias = TextPrompt | ChatPrompt


Job: TypeAlias = Prompt | Ids | ConstraintCheck


def job_from(plain: Plain) -> Job:
    """The inverse of `plain`.

    Raises:
        ValueError: it is none.
    """
    match plain:
        case ("text", str(text), bool(special)):
            return TextPrompt(text, special)
        case ("chat", tuple(chat), bool(special)):
            return ChatPrompt(conversation_from(chat), special)
        case ("ids", bytes(data), bool(special)):
            return Ids(tuple(array("I", data)), special)
        case (kind, str(name), list(texts), bytes(generated), bytes(ends)) if kind == KIND:
            return check_from(name, texts, generated, ends)
    raise ValueError("no job of a tokenizer")
