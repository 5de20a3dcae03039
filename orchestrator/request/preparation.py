"""Makes a request ready to run: checks it, tokenizes its texts, and checks its constraint."""

from __future__ import annotations

import secrets
from dataclasses import replace

from orchestrator.request.constraints import Constraints
from orchestrator.request.resolver import IncomingRequest, ResolvedRequest, Resolver
from orchestrator.text.conversion import Conversion
from orchestrator.text.jobs import Prompt
from orchestrator.text.tokenizer import TextTokenizer
from outrider.config import OrchestratorConfig
from outrider.protocol.messages import ModelInfo


class Preparation:
    """Prepares requests."""

    def __init__(self, config: OrchestratorConfig, conversion: Conversion, constraints: Constraints) -> None:
        self._config = config
        self._conversion = conversion
        self._constraints = constraints

    async def prepare(
        self, incoming: IncomingRequest, served: ModelInfo, tokenizer: TextTokenizer | None, request_id: str
    ) -> ResolvedRequest:
        """The request to run, for the model that is served.

        Raises:
            OutriderError: see `Resolver`, `Conversion.tokens` and `Constraints.complete`.
        """
        resolver = Resolver(
            served=served,
            tokenizer=tokenizer,
            default_max_tokens=self._config.default_max_tokens,
            draw_seed=lambda: secrets.randbits(64),
            max_priority=self._config.max_priority,
        )

        async def tokens(given: Prompt | tuple[int, ...]) -> tuple[int, ...]:
            if isinstance(given, tuple):
                return given
            return await self._conversion.tokens(given, tokenizer, served.context_length)

        resolver.check(incoming)
        assert incoming.prompt is not None
        prompt, prediction = await tokens(incoming.prompt), await tokens(incoming.prediction)
        request = resolver.resolve(incoming, request_id, prompt, prediction)
        if tokenizer is None:
            return request
        complete = await self._constraints.complete(incoming, tokenizer, served)
        return replace(request, complete=complete)
