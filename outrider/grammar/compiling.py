"""Compiles a constraint to a matcher of the grammar library; an error names the place in the constraint."""

from __future__ import annotations

import json
from typing import Any, assert_never

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from outrider.grammar.matcher import on_one_line
from outrider.grammar.places import find_in_grammar, find_in_regex, find_in_schema
from outrider.protocol.constraint import Constraint, ConstraintKind
from outrider.protocol.errors import InvalidRequest, no_json

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=65_536,
    max_grammar_size=500_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)
"""Limits of the grammar library. The first and the sixth bound the size of a grammar, the second the work to
compile it, the third and fourth the work for one mask (15 and 3 ms), the fifth the memory of one compiled
grammar (100 MB)."""
WHITESPACE = r"(?:\x20|\r?\n[\x20\t]{0,32})"
"""What may stand between the parts of a JSON text, at most once: a space, or a line break with an
indentation. Without a bound, a model could write white space for ever."""


def compiled(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the text. Compiling takes milliseconds, for a large schema seconds.

    Raises:
        InvalidRequest: the constraint is wrong or too costly; names the place in it.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
            return _json(constraint, vocabulary)
        case ConstraintKind.REGEX:
            return _regex(constraint, vocabulary)
        case ConstraintKind.CHOICE:
            source = grammar_from("choice", json.dumps(constraint.texts))
            return _checked(constraint, _matcher(source, vocabulary))
        case ConstraintKind.GRAMMAR:
            return _grammar(constraint, vocabulary)
        case _:
            assert_never(constraint.kind)


def _json(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    schema = _schema(constraint)

    def attempt(part: dict[str, Any]) -> LLMatcher:
        source = LLMatcher.grammar_from_json_schema(json.dumps(part), {"whitespace_pattern": WHITESPACE})
        return _matcher(source, vocabulary)

    try:
        matcher = attempt(schema)
    except ValueError as error:
        raise InvalidRequest(constraint.field, on_one_line(str(error))) from None
    if not matcher.is_error():
        return matcher
    problem = matcher.get_error()
    place = find_in_schema(schema, problem, lambda part: attempt(part).get_error())
    raise InvalidRequest(constraint.field, f"at {place}: {on_one_line(problem)}")


def _schema(constraint: Constraint) -> dict[str, Any]:
    """The parsed schema; property names keep their order."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"type": "object"}
    try:
        schema = json.loads(constraint.texts[0])
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(constraint.field, f"is no JSON: {no_json(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(constraint.field, "must be a JSON object")
    return schema


def _regex(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    regex = constraint.texts[0]
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InvalidRequest(constraint.field, f"at character {len(regex)}: nothing follows the backslash")
    matcher = _matcher(LLMatcher.grammar_from_regex(regex), vocabulary)
    return _checked(constraint, matcher, find_in_regex(matcher.get_error()))


def _grammar(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    text = constraint.texts[0]
    if text.lstrip().startswith("{"):
        raise InvalidRequest(constraint.field, "must be Lark or GBNF, not JSON; a schema goes in json_schema")
    try:
        source = grammar_from("gbnf" if "::=" in text else "lark", text)
    except ValueError as error:
        raise InvalidRequest(constraint.field, on_one_line(str(error))) from None
    matcher = _matcher(source, vocabulary)
    return _checked(constraint, matcher, find_in_grammar(matcher.get_error()))


def _matcher(source: str, vocabulary: LLTokenizer) -> LLMatcher:
    return LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)


def _checked(constraint: Constraint, matcher: LLMatcher, problem: str = "") -> LLMatcher:
    if matcher.is_error():
        raise InvalidRequest(constraint.field, problem or on_one_line(matcher.get_error()))
    return matcher
