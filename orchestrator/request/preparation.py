"""Makes a request ready to run: checks it, tokenizes its texts, and checks its constraint."""

from __future__ import annotations

import secrets
from dataclasses import replace

from orchestrator.request.constraints import Constraints
from orchestrator.request.resolver import IncomingRequest, ResolvedRequest, Resolver
from orchestrator.text.conversion import Conversion
from orchestrator.text.tokenizer import TextTokenizer
from outrider.config import OrchestratorConfig
from outrider.protocol.messages import ModelInfo


class Preparation:
    """Prepares requests. Short texts are tokenized on the event loop, long ones in another process."""

    def __init__(self, config: OrchestratorConfig, conversion: Conversion, constraints: Constraints) -> None:
        self._config = config
        self._conversion = conversion
        self._constraints = constraints

    async def prepare(
        self,
        incoming: IncomingRequest,
        served: ModelInfo,
        tokenizer: TextTokenizer | None,
        request_id: str,
        deadline: float,
    ) -> ResolvedRequest:
        """The request to run, for the model that is served.

        Raises:
            OutriderError: see `Resolver.resolve`, `Conversion.tokens` and `Constraints.complete`.
        """
        resolver = Resolver(
            served=served,
            tokenizer=tokenizer,
            default_max_tokens=self._config.default_max_tokens,
            draw_seed=_draw_seed,
            max_priority=self._config.max_priority,
        )
        positions = served.context_length
        predicted = incoming.predicted_text
        if predicted is not None:
            resolver.check(incoming)
            prediction = await self._conversion.tokens(predicted, tokenizer, positions, deadline)
            incoming = replace(incoming, prediction=prediction)
        prompt, tokens = incoming.prompt, None
        if prompt is not None and not prompt.is_quick:
            resolver.check(incoming)
            tokens = await self._conversion.tokens(prompt, tokenizer, positions, deadline)
        request = resolver.resolve(incoming, request_id, tokens)
        if tokenizer is None or incoming.sampling.constraint is None:
            return request
        complete = await self._constraints.complete(incoming, tokenizer, served, deadline)
        return replace(request, complete=complete)


def _draw_seed() -> int:
    return secrets.randbits(64)
