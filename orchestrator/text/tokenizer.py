"""The target's tokenizer and chat template, from files that a verify replica sends.

`tokenizers` and `jinja2` are imported at first use: the orchestrator does not need them to start, or to serve
a model without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.text.conversation import Conversation
from orchestrator.text.spelling import Spellings, unfinished_bytes
from orchestrator.text.template import ChatTemplate
from outrider.protocol.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMALIZED = 4
"""Most bytes of text that a normalizer turns into one: a mathematical letter becomes an ASCII letter. (A
normalizer that drops text may take more; such a text counts in full.)"""
UNFINISHED = 3
"""Most tokens of an unfinished character: a character has at most four bytes in UTF-8."""
CHARACTERS_PER_POSITION = 4
"""Characters per position of the context up to which a text that may be far too long is first tokenized."""


class TokenizerParts(NamedTuple):
    """The arguments of `TextTokenizer`, from which it is made here or in another process."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    tool_chat_template: str


class TextTokenizer:
    """Converts texts and conversations to token ids, and token ids to text."""

    def __init__(
        self,
        tokenizer_json: bytes,
        chat_template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        tool_chat_template: str = "",
    ) -> None:
        """Conversations with tools use `tool_chat_template`; if that is empty, the same template as others.

        Raises:
            InternalError: the tokenizer cannot be read.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # what the library raises
            raise InternalError(f"the model's tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.files = TokenizerParts(
            tokenizer_json, chat_template, dict(special_tokens or {}), tool_chat_template
        )
        self._template = self._parsed(chat_template)
        self._tool_template = self._parsed(tool_chat_template) or self._template
        self.byte_tokens = _byte_tokens(self._tokenizer)
        """Ids of the byte tokens of a byte-fallback vocabulary, such as `<0x0A>`."""
        self.bytes_per_token = _longest_token(self._tokenizer)
        """Most bytes of text that one token stands for."""
        self._special_ids = _special_ids(self._tokenizer)
        self._spellings = Spellings(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    def encode(self, text: str, positions: int | None = None, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of plain text, with the tokenizer's tokens around it unless `special_tokens` is off.

        If there are more than `positions` tokens, they may be those of the text's beginning only: then time
        and memory depend on `positions` and not on the text. Ever longer beginnings are tokenized, until one
        is the whole text or has too many tokens. What follows a beginning may change its last tokens, so it
        has too many only when it exceeds `positions` by the bytes of the longest token.
        """
        if positions is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
        length = CHARACTERS_PER_POSITION * (positions + self.bytes_per_token)
        while True:
            begun = [text[:length]]
            ids = self._tokenizer.encode_batch_fast(begun, add_special_tokens=special_tokens)[0].ids
            if length >= len(text) or len(ids) > positions + self.bytes_per_token:
                return tuple(ids)
            length *= 2

    def encode_chat(
        self, chat: Conversation, positions: int | None = None, special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template.

        If there are more than `positions` tokens, they may be those of its beginning only.

        Raises:
            InvalidRequest: there is no template, or it refuses the conversation.
        """
        template = self._tool_template if chat.tools else self._template
        if template is None:
            raise InvalidRequest("chat", "the model came without a chat template; send text or token_ids")
        return self.encode(template.render(chat), positions, special_tokens)

    def has_no_text(self, token: int, special_tokens: bool = False) -> bool:
        """Whether `decode` leaves a token out: it is special, or an id that the tokenizer does not have."""
        special = token in self._special_ids and not special_tokens
        return special or self._tokenizer.id_to_token(token) is None

    def end_of(self, prompt: Sequence[int], special_tokens: bool = False) -> tuple[int, ...]:
        """The tokens at the end of a prompt that decide how `decode` spells what follows.

        These are the tokens of an unfinished character, and one token with text before them: decoders spell
        the first text differently, without its space. That token is not a byte token, because a run of byte
        tokens is decoded as a whole.
        """
        backwards = (token for token in reversed(prompt) if not self.has_no_text(token, special_tokens))
        last, unfinished = [*islice(backwards, UNFINISHED)], 0
        missing = unfinished_bytes(b"".join(map(self.spelling, reversed(last))))
        while missing > 0 and unfinished < len(last):
            missing -= len(self.spelling(last[unfinished]))
            unfinished += 1
        before = (t for t in chain(last[unfinished:], backwards) if t not in self.byte_tokens)
        return (*islice(before, 1), *reversed(last[:unfinished]))

    def spelling(self, token: int) -> bytes:
        """The bytes that a token stands for, even a special one; empty for an id that the tokenizer lacks."""
        return self._spellings.of(token)

    def _parsed(self, source: str) -> ChatTemplate | None:
        return ChatTemplate.parse(source, self.files.special_tokens) if source else None

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Text of token ids; special tokens have a text only if `special_tokens` is set."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not special_tokens)


def _longest_token(tokenizer: Tokenizer) -> int:
    """A bound on the bytes of text of one token. Vocabularies spell a byte in one or more characters."""
    longest = max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest * (1 if tokenizer.normalizer is None else NORMALIZED)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(id for id, token in added.items() if token.special)


def _byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(id for id in ids if id is not None)
