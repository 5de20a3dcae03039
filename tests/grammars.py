"""Constraints for tests, over the demo pair's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from outrider.grammar.compiling import compiled
from outrider.grammar.matcher import Mask, Matcher, allowed, replay
from outrider.grammar.vocabulary import vocabulary_of
from outrider.protocol.constraint import Constraint, ConstraintKind

TOKENIZER = Path(__file__).resolve().parents[1] / "models/demo/target/tokenizer.json"
EOS = 0


def json_schema(schema: Any) -> Constraint:
    """A JSON schema."""
    return Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),))


def regex(text: str) -> Constraint:
    """A regular expression."""
    return Constraint(ConstraintKind.REGEX, (text,))


def choice(*texts: str) -> Constraint:
    """Some texts."""
    return Constraint(ConstraintKind.CHOICE, texts)


def grammar(text: str) -> Constraint:
    """A grammar."""
    return Constraint(ConstraintKind.GRAMMAR, (text,))


@cache
def vocabulary() -> LLTokenizer:
    """That of the demo pair."""
    return vocabulary_of(TOKENIZER.read_bytes(), [EOS])


def ids(text: str) -> list[int]:
    """Token ids of a text."""
    return vocabulary().tokenize_str(text)


def matcher(constraint: Constraint, tokens: Sequence[int] = (), words: LLTokenizer | None = None) -> Matcher:
    """A new matcher after some tokens, which follow the constraint."""
    found = Matcher(compiled(constraint, words or vocabulary()))
    assert replay(found, tokens) == len(tokens)
    return found


def tokens_of(mask: Mask) -> list[int]:
    """The tokens of a mask."""
    return [token for token in range(8 * len(mask)) if allowed(mask, token)]


def accepts(source: str, text: str) -> bool:
    """Whether a whole text follows a grammar."""
    follows = matcher(grammar(source))
    for token in ids(text):
        if not follows.allows(()) or token not in tokens_of(follows.mask(())):
            return False
        follows.advance(token)
    return not follows.allows(()) or EOS in tokens_of(follows.mask(()))
