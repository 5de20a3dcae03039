"""Constraints on an answer, as grammars of texts in which reasoning comes before it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.gateway.calls.call_grammar import json_rule, literal
from orchestrator.gateway.calls.reasoning import FIRST, begins_reasoning, skips_reasoning
from outrider.client import Request
from outrider.protocol.constraint import MAX_BYTES

REST = r"reasoning_rest[lazy]: /(?s:.*)<\/think>/"
"""Reasoning behind its first tag, and the last tag."""
BETWEEN = r"reasoning_space: /[ \t\r\n]{0,4}/"
OWN = "constrained_answer: %lark {"
"""The line before a grammar of the caller."""
GBNF = "::="
"""What makes a grammar one in GBNF, wherever it is."""
REWRITTEN = re.compile(r"\\.|[/\n\r]", re.S)
"""An escaped character of a regular expression, or one that its line in a grammar may not have."""
ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def after_reasoning(request: Request, prompt_end: str) -> Request | None:
    """The request, with its constraint as a grammar that holds behind the reasoning.

    The reasoning may be left out, unless the template has begun it at the prompt's end. None: the constraint
    stays as it is, because the template leaves the reasoning out, or the constraint is written in GBNF or
    will be refused: it is empty, too large, or no JSON.
    """
    if skips_reasoning(prompt_end):
        return None
    try:
        answer = _answer(request)
    except RecursionError:  # the schema is nested too deeply
        return None
    if answer is None or GBNF in answer:
        return None
    start = "reasoning_rest reasoning_space"
    if not begins_reasoning(prompt_end):
        start = f"({literal(FIRST)} {start})?"
    grammar = "\n".join([f"start: {start} constrained_answer", REST, BETWEEN, answer])
    return replace(request, grammar=grammar, json_schema=None, json_object=None, regex=None, choice=())


def _answer(request: Request) -> str | None:
    """The rule `constrained_answer`, and those that it needs."""
    texts = (request.json_schema, request.regex, request.grammar, *request.choice)
    if "" in texts or sum(len(text) for text in texts if isinstance(text, str)) > MAX_BYTES:
        return None
    if request.json_object:
        return f"constrained_answer: {json_rule({'type': 'object'})}"
    if request.json_schema is not None:
        schema = _parsed(request.json_schema)
        return None if schema is None else f"constrained_answer: {json_rule(schema)}"
    if request.regex is not None:
        return f"constrained_answer: /{_in_slashes(request.regex)}/"
    if request.choice:
        return "constrained_answer: " + " | ".join(map(literal, request.choice))
    # A grammar within the grammar: its names are its own, and it may refer to its start.
    return f"{OWN}\n{request.grammar}\n}}"


def _parsed(schema: str | Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError:
        return None
    return found if isinstance(found, Mapping) else None


def _in_slashes(regex: str) -> str:
    """A regular expression as it is written in a grammar: on one line, without slashes that would end it."""
    return REWRITTEN.sub(lambda found: ESCAPED.get(found[0][-1], found[0]), regex)
