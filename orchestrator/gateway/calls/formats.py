"""The formats in which models write. Output is read in one, and a caller may require calls in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.gateway.calls.argument_types import ArgumentTypes
from orchestrator.gateway.calls.call_grammar import hermes_grammar, llama3_grammar, tagged_grammar
from orchestrator.gateway.calls.call_reader import CallParser
from orchestrator.gateway.calls.call_tags import CallTags
from orchestrator.gateway.calls.hermes import HermesParser
from orchestrator.gateway.calls.llama3 import Llama3Parser
from outrider.client import Tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    parser: Callable[[Sequence[Tool]], CallParser]
    """Makes a parser that finds calls in a text; its argument are the functions that were offered."""
    grammar: Callable[[Sequence[Tool], bool], str]
    """Makes the grammar of texts that consist only of calls of these functions.

    The flag allows several calls; otherwise there is exactly one.
    """
    marked: bool = False
    """True when a call begins with a mark. Otherwise a grammar cannot tell a call from an answer in JSON."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the served model writes its answers."""

    calls: CallFormat | None = None
    """The format of calls; None: it cannot call tools."""
    reasoning: bool = False
    """True when it may write reasoning before the answer; see `reasoning`."""


def _llama3(tools: Sequence[Tool]) -> CallParser:
    return Llama3Parser({tool.name for tool in tools}.__contains__)


def _tagged(tools: Sequence[Tool]) -> CallParser:
    types = ArgumentTypes(tools)
    return HermesParser(lambda: CallTags(types))


FORMATS: Mapping[str, CallFormat | None] = {
    "none": None,
    "hermes": CallFormat(lambda _: HermesParser(), hermes_grammar, marked=True),
    "llama3": CallFormat(_llama3, llama3_grammar),
    "qwen3_coder": CallFormat(_tagged, tagged_grammar, marked=True),
}
