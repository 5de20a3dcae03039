"""Finds what in the request is wrong when the service refuses a grammar that the gateway wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.gateway.calls.reasoning_grammar import OWN
from outrider.client import Tool

PLACE = re.compile(r"^at line (\d+), column (\d+): ")
FUNCTION = re.compile(r"^[afp](\d+)(?:x\d+)?: ")
"""The beginning of a rule for calls of one function; see `call_grammar`."""
QUOTED = re.compile(r'^(?:failed to compile JSON schema|invalid regex "(?:[^"\\]|\\.)*" \(in regex\)): ')


def fault_in(grammar: str, problem: str, tools: Sequence[Tool]) -> tuple[Tool | None, str]:
    """The function whose parameters are wrong, if it is one, and the problem without places in the grammar,
    which the caller does not know. `tools` are the functions whose calls the grammar allows.

    A grammar of the caller within it keeps its lines, counted from its own first one.
    """
    found = PLACE.match(problem)
    if found is None:
        return None, problem
    lines, number = grammar.split("\n"), int(found[1])
    said = QUOTED.sub("", problem[found.end() :])
    if not tools:
        own = number - lines.index(OWN) - 1 if OWN in lines else 0
        return None, f"at line {own}, column {found[2]}: {said}" if own > 0 else said
    rule = FUNCTION.match(lines[number - 1])
    return tools[int(rule[1])] if rule else None, said
