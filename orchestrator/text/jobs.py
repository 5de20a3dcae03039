"""What a tokenizer can be asked: here, or as plain data in another process."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, TypeAlias

from orchestrator.text.constraint_check import KIND, ConstraintCheck, check_from
from orchestrator.text.tokenizer import ChatMessage, TextTokenizer

MESSAGE_BYTES = 64
"""What a message of a conversation counts besides its text: the template runs for each."""
ID_BYTES = 4
OVER_BOUNDS = "takes more time or memory to tokenize than a prompt may; shorten it"
"""What is said of a job that is the end of its process."""

Plain: TypeAlias = tuple[Any, ...]
"""A kind, and values that `marshal` knows."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text whose token ids are wanted."""

    text: str
    special_tokens: bool = True
    field: str = "text"
    """Of the request that it came in."""
    over_bounds = OVER_BOUNDS

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return len(self.text.encode())

    def plain(self) -> Plain:
        """For `job_from`."""
        return "text", self.text, self.special_tokens

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode`."""
        return tokenizer.encode(self.text, positions, self.special_tokens)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation whose token ids are wanted."""

    messages: tuple[ChatMessage, ...]
    special_tokens: bool = False
    generation_prompt: bool = True
    over_bounds = OVER_BOUNDS

    @property
    def field(self) -> str:
        """Of the request that it came in."""
        return "chat.messages"

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return sum(MESSAGE_BYTES + len(message.content.encode()) for message in self.messages)

    def plain(self) -> Plain:
        """For `job_from`."""
        pairs = [(message.role, message.content) for message in self.messages]
        return "chat", pairs, self.special_tokens, self.generation_prompt

    def tokens(self, tokenizer: TextTokenizer, positions: int | None = None) -> tuple[int, ...]:
        """See `TextTokenizer.encode_chat`."""
        return tokenizer.encode_chat(
            self.messages, positions, self.special_tokens, generation_prompt=self.generation_prompt
        )


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids whose text is wanted."""

    ids: tuple[int, ...]
    special_tokens: bool = False
    over_bounds = OVER_BOUNDS

    @property
    def field(self) -> str:
        """Of the request that they came in."""
        return "token_ids"

    @property
    def size(self) -> int:
        """Bytes that they count."""
        return ID_BYTES * len(self.ids)

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
        case ("chat", list(pairs), bool(special), bool(generation)):
            return ChatPrompt(tuple(ChatMessage(*pair) for pair in pairs), special, generation)
        case ("ids", bytes(data), bool(special)):
            return Ids(tuple(array("I", data)), special)
        case (kind, str(name), list(texts), bytes(generated), bytes(ends)) if kind == KIND:
            return check_from(name, texts, generated, ends)
    raise ValueError("no job of a tokenizer")
