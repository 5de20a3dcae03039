"""How the endpoints write choices: what they share, and the form of `/v1/completions`. Pure."""

from __future__ import annotations

import math
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.client import Chunk, Complete, Generation, TokenLogprob

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer says of its prompt; `text` is None unless the answer repeats the prompt. Tokens may have
    no text."""

    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of all its tokens; the first token has none."""


@dataclass(slots=True)
class Place:
    """A place in a text, which tokens move on. Parts of a character may be spread over tokens."""

    characters: int = 0
    """Whole characters so far. Bytes that are none count as the replacement characters that texts have."""
    _decoder: IncrementalDecoder = field(default_factory=partial(getincrementaldecoder("utf-8"), "replace"))

    @classmethod
    def of_echo(cls, text: str, prompt: Sequence[TokenLogprob]) -> Place:
        """The place where an echo of this text begins: below 0 if the prompt's tokens have characters that it
        lacks, in a token that the tokenizer puts first, or a first space."""
        end = cls()
        for entry in prompt:
            end.take(entry)
        return cls(min(0, len(text) - end.characters))

    def take(self, entry: TokenLogprob) -> int:
        """Move behind a token, and return the place of the first character that it has a part of."""
        written = _written(entry)
        if any(byte & 0xC0 != 0x80 for byte in written[:1]):  # a character in front of it ends, whole or not
            self.characters += len(self._decoder.decode(b"", final=True))
        start = max(0, self.characters)
        self.characters += len(self._decoder.decode(written))
        return start


@dataclass(slots=True)
class CompletionShape:
    """The objects of `/v1/completions`. `whole` and `part` are the `object` fields of answers and parts."""

    top: int | None
    """Number of alternatives to show for each token; None: no log probabilities."""
    prompt_logprobs: bool = False
    """True when the prompt's log probabilities are a field of their own."""
    whole = part = "text_completion"
    _places: dict[int, Place] = field(default_factory=dict)
    """Where the tokens so far end, by the index of their choice."""

    def begin(self, index: int, prompt_end: str) -> dict[str, Any] | None:
        """The first part of a choice; a completion has none."""
        return None

    def skip(self, index: int, text: str) -> None:
        """Take in text that the caller has already."""

    def text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """New text."""
        return self._choice(index, chunk.text, chunk.logprobs, None, None)

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """The last part of a choice."""
        return self._choice(index, "", (), complete.finish_reason, complete.stop)

    def choice(self, index: int, generation: Generation, prompt: Prompt) -> dict[str, Any]:
        """A whole choice."""
        end = generation.end
        echo, text = prompt.text is not None, prompt.text or ""
        shown = [*(prompt.logprobs if echo else ()), *generation.logprobs]
        if echo:
            self._places[index] = Place.of_echo(text, prompt.logprobs)
        found = self._choice(index, text + generation.text, shown, end.finish_reason, end.stop)
        if echo and found["logprobs"]:
            _blank_first(found["logprobs"])
        return found | ({"prompt_logprobs": of_prompt(prompt.logprobs)} if self.prompt_logprobs else {})

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        shown = self._logprobs(index, logprobs) if logprobs and self.top is not None else None
        return {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": reason,
            "stop_reason": stop or None,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        place = self._places.setdefault(index, Place())
        return {
            "tokens": [spelled(entry) for entry in logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": [place.take(entry) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best alternatives, and the token itself if it is not among them.

        Of tokens that are spelled alike, such as parts of characters, the best counts: clients compare the
        token with the greatest number.
        """
        found: dict[str, float] = {}
        for one in (*entry.top, entry):  # the best comes first
            found.setdefault(spelled(one), finite(one.logprob))
        return found


def of_prompt(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """The prompt's log probabilities in vLLM's form: each token and its best alternatives, by token id.

    The first token has none.
    """
    return [None, *(_by_id(entry) for entry in logprobs[1:])]


def spelled(entry: TokenLogprob) -> str:
    """The token's text, with a replacement character for bytes that are not a whole character."""
    if entry.spelling is None:
        return f"token_id:{entry.token}"
    return entry.spelling.decode("utf-8", errors="replace")


def _written(entry: TokenLogprob) -> bytes:
    return spelled(entry).encode() if entry.spelling is None else entry.spelling


def finite(logprob: float) -> float:
    """The log probability as a number that JSON can write."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def content_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log probabilities in the form of `/v1/chat/completions`."""
    return [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in logprobs]


def _entry(one: TokenLogprob) -> dict[str, Any]:
    spelling = None if one.spelling is None else list(one.spelling)
    return {"token": spelled(one), "logprob": finite(one.logprob), "bytes": spelling}


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    ranks = {other.token: rank for rank, other in enumerate(entry.top, 1)}
    return {
        str(one.token): {
            "logprob": finite(one.logprob),
            "rank": ranks.get(one.token),
            "decoded_token": spelled(one),
        }
        for one in (*entry.top, entry)
    }


def _blank_first(logprobs: dict[str, Any]) -> None:
    """Set the first token's log probabilities to None: nothing comes before it."""
    logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
