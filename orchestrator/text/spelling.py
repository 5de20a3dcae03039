"""The bytes that single tokens stand for. A token may be only a part of a character, which has no text."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte token of a byte-fallback vocabulary."""
SPACE = "\u2581"
"""Character that stands for a space in vocabularies made of text."""
CACHED = 16384
"""Number of tokens whose spelling is cached: most alternatives are the same few tokens."""


class Spellings:
    """The tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._bytewise = "ByteLevel" in repr(tokenizer.decoder)
        self._wordwise = "WordPiece" in repr(tokenizer.decoder)
        self.of = lru_cache(CACHED)(self._of)

    def _of(self, token: int) -> bytes:
        """The bytes of a token id; none for an id that the vocabulary does not have."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._bytewise:
            return bytes(BYTES[sign] for sign in piece if sign in BYTES)
        if found := BYTE.fullmatch(piece):
            return bytes.fromhex(found[1])
        if self._wordwise:  # take it after itself: only there a word has its space
            once, twice = (self._tokenizer.decode([token] * count) for count in (1, 2))
            return twice[len(once) :].encode()
        return piece.replace(SPACE, " ").encode()


def unfinished_bytes(text: bytes) -> int:
    """Number of bytes at the end of a text that are an unfinished character; 0 to 3."""
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return len(decoder.getstate()[0])


def _bytes_of_signs() -> dict[str, int]:
    """The byte for each character by which byte-level vocabularies write bytes.

    A visible character stands for its own byte. The other bytes have the characters from U+0100 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTES = _bytes_of_signs()
