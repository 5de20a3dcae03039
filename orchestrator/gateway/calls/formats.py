"""How the model that is served writes its calls: the format that is read, and that a caller may require."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.gateway.calls.call_grammar import hermes_grammar, llama3_grammar
from orchestrator.gateway.calls.call_reader import Accepts, CallParser
from orchestrator.gateway.calls.hermes import HermesParser
from orchestrator.gateway.calls.llama3 import Llama3Parser
from outrider.client import Tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    parser: Callable[[Accepts], CallParser]
    """Finds calls in a text; takes what says which functions were offered."""
    grammar: Callable[[Sequence[Tool], bool], str]
    """Texts that are calls of these functions and nothing else: several, or exactly one."""


FORMATS: Mapping[str, CallFormat | None] = {
    "none": None,
    "hermes": CallFormat(lambda _: HermesParser(), hermes_grammar),
    "llama3": CallFormat(Llama3Parser, llama3_grammar),
}
