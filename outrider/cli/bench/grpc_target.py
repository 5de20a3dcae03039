"""Outrider's own service as a target."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.cli.bench.target import Ask, Delivered, Ended, Event, Sampling, Served
from outrider.client.aio import AsyncClient
from outrider.client.request import Mode, Options
from outrider.client.results import Chunk, Complete, Started

INFO_SECONDS = 10.0
"""Longest wait, in seconds, for the description of what is served."""


class GrpcTarget:
    """An orchestrator, through the client library; the client must not retry, as that would hide failures."""

    def __init__(self, client: AsyncClient, served: Served, options: Options) -> None:
        self.served = served
        self._client = client
        self._options = options

    @classmethod
    async def reach(cls, client: AsyncClient, sampling: Sampling, mode: Mode, model: str) -> GrpcTarget:
        """A target for the client's orchestrator; an empty `model` stands for the one that it serves.

        Raises:
            OutriderError: the orchestrator cannot be reached.
        """
        info = await client.model_info(timeout=INFO_SECONDS)
        served = Served(
            address=f"gRPC {client.endpoint}",
            model=model or info.model,
            vocabulary=info.vocabulary_size,
            eos_token_ids=info.eos_token_ids,
        )
        return cls(client, served, _options(sampling, mode, model))

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """See `BenchTarget`."""
        options = self._options.copy()
        if ask.seed is not None:
            options["seed"] = ask.seed
        async with aclosing(self._client.stream(ask.prompt, **options)) as events:
            async for event in events:
                match event:
                    case Chunk():
                        if event.token_ids:
                            yield Delivered()
                    case Complete():
                        yield _ended(event)
                    case Started():
                        pass


def _options(sampling: Sampling, mode: Mode, model: str) -> Options:
    options = Options(
        max_tokens=sampling.max_tokens, temperature=sampling.temperature, mode=mode, model=model
    )
    if sampling.ignore_eos:
        options["ignore_eos"] = True
    return options


def _ended(complete: Complete) -> Ended:
    return Ended(
        input_tokens=complete.usage.prompt_tokens,
        output_tokens=complete.usage.completion_tokens,
        cached_tokens=complete.usage.cached_tokens,
        finish_reason=complete.finish_reason,
        speculation=complete.speculation,
    )
