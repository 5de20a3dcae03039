"""Which parser reads the calls of the model that is served: a setting of the gateway."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.gateway.calls.call_reader import Accepts
from orchestrator.gateway.calls.hermes import HermesParser
from orchestrator.gateway.calls.llama3 import Llama3Parser
from orchestrator.gateway.responses import MakeParser


def _hermes(_accepts: Accepts) -> HermesParser:
    """The tags say what is a call, so that the model may err in a name and hear of it."""
    return HermesParser()


PARSERS: Mapping[str, MakeParser | None] = {"none": None, "hermes": _hermes, "llama3": Llama3Parser}
