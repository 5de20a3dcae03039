"""What single tokens stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.text.spelling import Spellings

DEMO = Path(__file__).resolve().parents[4] / "models/demo/target/tokenizer.json"


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "naïve café", "\N{SNOWMAN} \N{GHOST}\t\0"])
def test_spellings_make_the_text(text: str) -> None:
    """Byte for byte, where characters are split over tokens too."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    spellings = Spellings(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(spellings.of, ids)) == text.encode()


def test_special_and_unknown_tokens() -> None:
    """A special token is spelled as it is written; an id that is not there as nothing."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    spellings = Spellings(tokenizer)
    assert spellings.of(0) == b"<|endoftext|>"
    assert spellings.of(10**6) == b""


def test_vocabularies_made_of_text() -> None:
    """Their sign for a space is one, and byte tokens are their bytes."""
    vocabulary = {"\u2581the": 0, "<0xE2>": 1, "x": 2}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assert [Spellings(tokenizer).of(token) for token in range(3)] == [b" the", b"\xe2", b"x"]
