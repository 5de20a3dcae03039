"""The bytes of every token, in the form that the grammar library needs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)

BYTE_EOS = 256
"""The end-of-sequence token of `bytes_alone`; the tokens before are the bytes."""


def vocabulary_of(tokenizer_json: bytes, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model's tokenizer. This is slow for a large one, and holds the interpreter's lock.

    Raises:
        ValueError: the tokenizer is of a kind that is not understood, or the model has no end token.
    """
    if not eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    return LLTokenizer(_without_first_space(tokenizer_json.decode()), eos_token=list(eos_token_ids))


def _without_first_space(tokenizer_json: str) -> str:
    """The tokenizer without the space that some add before every text (`add_prefix_space`).

    The library tokenizes text that a grammar forces, and would otherwise allow a space that the grammar does
    not have.
    """
    tokenizer = json.loads(tokenizer_json)
    splitter = tokenizer.get("pre_tokenizer") or {}
    for part in (splitter, *splitter.get("pretokenizers", ())):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    return json.dumps(tokenizer)


def load_vocabulary(tokenizer_json: bytes | None, eos_token_ids: Sequence[int]) -> LLTokenizer | None:
    """The vocabulary, or None with a warning if it cannot be used: constraints are then refused."""
    if tokenizer_json is None:
        return None
    try:
        return vocabulary_of(tokenizer_json, eos_token_ids)
    except (ValueError, AttributeError) as error:  # AttributeError: JSON of another kind
        logger.warning("constraints are refused: the tokenizer cannot be used for them", error=str(error))
        return None


def bytes_alone() -> LLTokenizer:
    """A vocabulary of single bytes: enough to tell whether a constraint is sound and a text follows it."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """The interface that `TokenizerWrapper` needs."""

    eos_token_id = BYTE_EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (BYTE_EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
