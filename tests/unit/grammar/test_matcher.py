"""A mask is a function of the tokens on its path, whatever else was looked at before."""

from __future__ import annotations

import random
import re

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from outrider.grammar.compiling import LIMITS
from outrider.grammar.matcher import Matcher, allowed, only_token, replay
from outrider.grammar.vocabulary import vocabulary_of
from outrider.protocol.constraint import Constraint
from tests.grammars import (
    EOS,
    TOKENIZER,
    choice,
    grammar,
    ids,
    json_schema,
    matcher,
    regex,
    tokens_of,
    vocabulary,
)

RECURSIVE = json_schema(
    {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": ["integer", "null", "string"]}},
            "b": {"$ref": "#"},
            "c": {"enum": ["x", "yy", 3]},
        },
    }
)
BALANCED = grammar('start: "(" start ")" | "[" start "]" | ')


def random_paths(found: Matcher, draw: random.Random, count: int) -> list[tuple[int, ...]]:
    """Paths of a random tree below the committed tokens, some of them wrong, in random order."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(count):
        path = draw.choice(paths)
        mask = found.mask(path)
        if mask is not None:
            token = draw.choice(tokens_of(mask)) if draw.random() < 0.9 else draw.randrange(4096)
            paths.append((*path, token))
    draw.shuffle(paths)
    return paths


@pytest.mark.parametrize("constraint", [RECURSIVE, BALANCED, regex(r"(ab|ac)*[0-9]{2,5}x?")])
def test_the_mask_of_every_node_is_that_of_a_new_matcher(constraint: Constraint) -> None:
    """Trees are explored in any order between commits; each mask equals one computed for its path alone."""
    draw, compared = random.Random(1), 0
    for _ in range(6):
        found, committed = matcher(constraint), list[int]()
        while not found.complete and len(committed) < 8:
            for path in random_paths(found, draw, 10):
                fresh = matcher(constraint)
                possible = replay(fresh, [*committed, *path]) == len(committed) + len(path)
                if found.allows(path):
                    assert possible
                    assert found.mask(path) == fresh.mask(())
                    compared += 1
            mask = found.mask(())
            assert mask is not None
            committed.append(draw.choice(tokens_of(mask)))
            found.advance(committed[-1])
            assert not found.settle()
    assert compared > 40


def test_a_tokenizer_may_put_a_space_before_every_text() -> None:
    """What a grammar forces is allowed without it, at the beginning and later."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for pre_tokenizer in (splitter, pre_tokenizers.Sequence([pre_tokenizers.Digits(), splitter])):
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        tokenizer.pre_tokenizer = pre_tokenizer
        words = vocabulary_of(tokenizer.to_str().encode(), [EOS])
        found, text = matcher(regex("forced[0-9] again"), words=words), b""
        while not found.complete:
            mask = found.mask(())
            assert mask is not None
            text += words.decode_bytes([tokens_of(mask)[0]])
            found.advance(tokens_of(mask)[0])
            assert not found.problem
        assert re.fullmatch(rb"forced[0-9] again", text)


def test_a_mask_has_just_what_can_still_become_a_text() -> None:
    """Against all texts of a finite language, token by token; where bytes are forced, one of these tokens."""
    texts = ["red", "green", "grey", "gr", "blueish green"]
    tokens = {token: vocabulary().decode_bytes([token]).decode(errors="replace") for token in range(1, 4096)}
    tokens = {token: part for token, part in tokens.items() if part}
    stack = [()]
    while stack:
        path = stack.pop()
        said = vocabulary().decode_str(list(path))
        mask = matcher(choice(*texts)).mask(path)
        if mask is None:
            assert said in texts
            assert not any(text.startswith(said) and text != said for text in texts)
            continue
        right = {
            token for token, part in tokens.items() if any(text.startswith(said + part) for text in texts)
        }
        right |= {EOS} if said in texts else set()
        found = set(tokens_of(mask))
        assert found == right or (len(found) == 1 and found < right)
        stack += [(*path, token) for token in found - {EOS}]


def test_a_text_that_is_whole_is_complete_or_may_end() -> None:
    """Complete at once where nothing can follow; where something can, the end token is one of the choices."""
    found = matcher(regex("ab?"), ids("a"))
    assert not found.complete
    assert allowed(found.mask(()) or b"", EOS)
    assert found.advance(ids("b")[0])
    assert found.complete
    assert matcher(regex("ab?"), ids("a")).advance(EOS)
    assert not found.allows(())


def test_forced_tokens_are_each_the_only_one() -> None:
    """A chain along masks of one token, up to where there is a choice, the end, or the bound."""
    schema = {"type": "object", "properties": {"a long name indeed": {"enum": [1, 2]}}, "minProperties": 1}
    constraint = json_schema({**schema, "required": ["a long name indeed"], "additionalProperties": False})
    found = matcher(constraint, ids('{"'))
    chain = found.forced((), 16)
    assert vocabulary().decode_str(chain) == "a long name indeed"
    for depth in range(len(chain)):
        assert only_token(found.mask(tuple(chain[:depth])) or b"") == chain[depth]
    assert found.forced((), 2) == chain[:2]
    assert found.forced(tuple(chain[:2]), 16) == chain[2:]
    assert matcher(choice("yes")).forced((), 16) == ids("yes")[:-1], (
        "the token that ends the text is no candidate"
    )


def test_what_is_not_allowed_is_no_path() -> None:
    """Nor is anything below it, or below the end of a text."""
    found = matcher(choice("yes", "no"))
    wrong = ids("maybe")
    assert not found.allows(tuple(wrong[:1]))
    assert not found.allows(tuple(wrong))
    assert not found.allows((*ids("yes"), 5))
    assert not found.allows((4096, 1))
    assert found.mask(tuple(wrong)) is None


def test_a_wrong_commit_is_a_problem_and_nothing_follows() -> None:
    """It stays one; a candidate that is wrong is none."""
    found = matcher(choice("yes", "no"))
    assert not found.allows((7,))
    assert not found.settle()
    assert not found.advance(7)
    assert found.settle()
    assert not found.complete
    assert not found.allows(())
    assert not found.advance(ids("yes")[0])


def test_a_replay_ends_at_what_does_not_follow() -> None:
    """Or at what comes after the end."""
    assert replay(matcher(regex("a{3}")), [*ids("a"), *ids("b")]) == 1
    assert replay(matcher(choice("yes")), [*ids("yes"), EOS]) == len(ids("yes"))


def test_limits_are_those_that_we_set() -> None:
    """Explicit, for the library's may change."""
    assert LIMITS.max_lexer_states == 65_536
    assert not LIMITS.verbose_errors
