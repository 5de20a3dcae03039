"""Turns token ids into text, a few tokens at a time: only whole characters, and cut at stop strings.

    Detokenizer    tokens -> text that later tokens cannot change
    StopStrings    holds text back that may be the beginning of a stop string
    TextStream     both, in whole tokens: `Piece.text` is exactly the text of the piece's tokens

Every text that is given out is the text of whole tokens, so that a client that resumes with the tokens it
has seen gets each character once. The pieces together are what `tokenizer.decode(prompt and all tokens)` has
after the text of the prompt, cut before the stop string if there was one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

REPLACEMENT = "\ufffd"
RESUMED_AT_ONCE = 1024
"""Most resumed tokens that are decoded together. Decoding then goes back, token by token, to certain text."""
Decode = Callable[[Sequence[int]], str]


def _never(token: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `tokens` tokens and their text; `stop` is the stop string that ended the text, if one did."""

    tokens: int
    text: str
    stop: str = ""


class Detokenizer:
    """Decodes a growing list of tokens through a window that begins at a token already given out.

        [0, window)         forgotten
        [window, given)     given out; kept, because decoders treat the first token differently
        [given, end)        held back: their text may still change

    Two things may change text: a character whose bytes are spread over tokens (its unfinished bytes decode
    to U+FFFD), and byte tokens of a byte-fallback vocabulary, which decode together as one run.

    Tokens without text (special ones) are counted with the token before them and not kept. Any number of them
    may follow an unfinished character, and with every new token all would be decoded again.
    """

    def __init__(
        self,
        decode: Decode,
        byte_tokens: Collection[int] = (),
        has_no_text: Callable[[int], bool] = _never,
        prompt: Sequence[int] = (),
    ) -> None:
        """`has_no_text` says whether `decode` leaves a token out. `prompt` is `TextTokenizer.end_of` the
        prompt: its tokens count as given out, and are part of no piece."""
        self._decode = decode
        self._byte_tokens = byte_tokens
        self._has_no_text = has_no_text
        self._tokens = list(prompt)
        self._counts = [0] * len(prompt)
        """For each of `_tokens`: 1 and the number of tokens without text that follow it; 0 for the prompt."""
        self._run = 0
        """Number of byte tokens at the end of `_tokens`."""
        self._given = len(prompt)
        self._given_text = decode(prompt) if prompt else ""
        """The decoded text of [window, given); `_tokens` begins at the window."""

    @property
    def held(self) -> int:
        """Number of tokens held back."""
        return sum(self._counts[self._given :])

    @property
    def broken(self) -> str:
        """The text of the tokens held back, if nothing follows that changes it."""
        return self._behind_given(self._decode(self._tokens))

    def push(self, tokens: Sequence[int]) -> Piece:
        """Add tokens; return a piece with those whose text is now certain."""
        without_text = sum([self._take(token) for token in tokens])
        piece = self._give_certain(max(self._given, len(self._tokens) - self._run))
        return Piece(without_text + piece.tokens, piece.text)

    def flush(self) -> Piece:
        """The tokens that are still held back; unfinished characters become U+FFFD."""
        return self._give(len(self._tokens), self._decode(self._tokens))

    def _take(self, token: int) -> int:
        """Keep a token and return 0. Return 1 instead if the token is given out at once, because it has no
        text and no token before it is held back."""
        if not self._has_no_text(token):
            self._tokens.append(token)
            self._counts.append(1)
            self._run = self._run + 1 if token in self._byte_tokens else 0
        elif len(self._tokens) > self._given:
            self._counts[-1] += 1
        else:
            return 1
        return 0

    def _give_certain(self, end: int) -> Piece:
        """Give out those tokens up to `end` whose text later tokens cannot change."""
        if end == self._given:
            return Piece(0, "")
        text = self._decode(self._tokens[:end])
        certain = text[:-1] if text.endswith(REPLACEMENT) else text
        while not certain.startswith(text):
            end -= 1
            if end == self._given:
                return Piece(0, "")
            text = self._decode(self._tokens[:end])
        return self._give(end, text)

    def _give(self, end: int, text: str) -> Piece:
        piece = Piece(sum(self._counts[self._given : end]), self._behind_given(text))
        if piece.text:
            del self._tokens[: self._given], self._counts[: self._given]
            self._given = end - self._given
            self._given_text = self._decode(self._tokens[: self._given])
        else:  # tokens without text cannot begin a window: the next one would be decoded as a first token
            self._given = end
        return piece

    def _behind_given(self, text: str) -> str:
        """The text of the window after what was given out.

        A character of which the prompt had only a part is in it as a whole.
        """
        if text.startswith(self._given_text):
            return text[len(self._given_text) :]
        pairs = enumerate(zip(text, self._given_text, strict=False))
        return text[next((at for at, (sign, given) in pairs if sign != given), len(text)) :]


@dataclass(slots=True)
class StopStrings:
    """Finds stop strings in the text of successive pieces."""

    stops: Sequence[str]
    include: bool = False
    """True when a stop string that is found stays in the text."""
    _pending: list[Piece] = field(default_factory=list)

    @property
    def pending(self) -> str:
        """The text held back."""
        return "".join(piece.text for piece in self._pending)

    def push(self, piece: Piece) -> Piece:
        """Add a piece; return one with what can be given out, and with the stop string if one is complete."""
        self._pending.append(piece)
        text = self.pending
        matches = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            at, stop = min(matches)
            end = at + len(stop) if self.include else at
            return Piece(self._release(end, begun=True), text[:end], stop)
        certain = len(text) - self._longest_beginning(text)
        tokens = self._release(certain, begun=False)
        return Piece(tokens, text.removesuffix(self.pending))

    def flush(self) -> Piece:
        """The pieces that are still held back, as one: no stop string will follow."""
        pieces, self._pending = self._pending, []
        return Piece(sum(piece.tokens for piece in pieces), "".join(piece.text for piece in pieces))

    def _release(self, length: int, begun: bool) -> int:
        """Remove the pieces that end within `length` characters, or with `begun` those that begin there.

        Returns how many tokens they have.
        """
        position = tokens = 0
        while self._pending:
            piece = self._pending[0]
            if position + len(piece.text) > length and not (begun and position < length):
                break
            position += len(piece.text)
            tokens += piece.tokens
            del self._pending[0]
        return tokens

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class TextStream:
    """The text of one continuation. Without a tokenizer, tokens pass through with empty texts."""

    def __init__(
        self,
        decode: Decode | None,
        byte_tokens: Collection[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        resumed: Sequence[int] = (),
        has_no_text: Callable[[int], bool] = _never,
        include_stop: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        """`resumed` tokens and their text were given out before; they count towards `min_tokens`. The text of
        the `prompt` before them is not given out: see `Detokenizer`."""
        self._detokenizer = (
            Detokenizer(decode, byte_tokens, has_no_text, prompt) if decode is not None else None
        )
        self._stops = StopStrings(stops, include_stop) if stops else None
        self.consumed = 0
        """Number of tokens of the text so far, without those after a stop string."""
        self._exempt = min_tokens if stops else 0
        """Number of next tokens whose text is not searched for stop strings."""
        self._already_given = 0
        """Number of resumed tokens held back: they may be part of a character, or begin a stop string."""
        self._text_given = ""
        """Text of these tokens. The caller has nothing of a character that becomes whole later."""
        self.stop = ""
        """The stop string that the resumed tokens have reached; nothing follows it."""
        if self._detokenizer is not None and resumed:
            self._resume(self._detokenizer, resumed)

    def _resume(self, detokenizer: Detokenizer, resumed: Sequence[int]) -> None:
        """Take in the tokens that the caller has, and find what was held back of them."""
        given = at = 0
        while at < len(resumed):
            size = self._exempt - detokenizer.held if self._exempt > 0 else RESUMED_AT_ONCE
            tokens = resumed[at : at + max(1, min(size, RESUMED_AT_ONCE))]
            at += len(tokens)
            for piece in self._search(detokenizer.push(tokens)):
                given += piece.tokens
                self.stop = piece.stop
            if self.stop:
                return
        self._already_given = len(resumed) - given
        pending = self._stops.pending if self._stops is not None else ""
        self._text_given = pending + (detokenizer.broken if detokenizer.held else "")

    def push(self, tokens: Sequence[int]) -> list[Piece]:
        """Add tokens; return the pieces that can be given out. A piece with `stop` is the last one."""
        if self._detokenizer is None or self._stops is None:
            self.consumed += len(tokens)
            if self._detokenizer is None:
                return [Piece(len(tokens), "")]
            return self._new(self._search(self._detokenizer.push(tokens)))
        pieces: list[Piece] = []
        for token in tokens:  # one by one: a stop string ends at a token
            self.consumed += 1
            pieces += self._new(self._search(self._detokenizer.push((token,))))
            if pieces and pieces[-1].stop:
                break
        return pieces

    def flush(self) -> list[Piece]:
        """The rest of the text at its end; it may still complete a stop string."""
        if self._detokenizer is None:
            return []
        pieces = self._search(self._detokenizer.flush())
        if self._stops is not None and not (pieces and pieces[-1].stop):
            pieces.append(self._stops.flush())
        return self._new(pieces)

    def _search(self, piece: Piece) -> list[Piece]:
        if self._stops is None:
            return [piece]
        if self._exempt > 0:
            self._exempt -= piece.tokens
            return [piece]
        return [self._stops.push(piece)]

    def _new(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The parts of some pieces that the caller does not have; empty pieces are left out."""
        return [self._without_known(piece) for piece in pieces if piece.tokens or piece.stop]

    def _without_known(self, piece: Piece) -> Piece:
        known = min(self._already_given, piece.tokens)
        if not known:
            return piece
        self._already_given -= known
        text, given = piece.text, self._text_given
        if given.startswith(text):
            text, self._text_given = "", given[len(text) :]
        else:
            text, self._text_given = text.removeprefix(given), ""
        return Piece(piece.tokens - known, text, piece.stop)
