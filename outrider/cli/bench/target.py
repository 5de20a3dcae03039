"""The server that a load is sent to, as the load generator sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from outrider.client.conversation import Message

Prompt: TypeAlias = str | tuple[int, ...] | tuple[Message, ...]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load, without what is the same for all requests, which the target knows."""

    index: int
    prompt: Prompt
    seed: int | None = None
    """Seed of the sampling noise; None: the server's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters that all requests of a load have in common."""

    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The server and the model that answer."""

    address: str
    """Such as `gRPC 127.0.0.1:7700`."""
    model: str
    vocabulary: int | None = None
    """Number of token ids; None if the server does not report it."""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """One or several new tokens have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an answer, with the server's counts."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the server had cached."""
    finish_reason: str = ""
    speculation: Mapping[str, float] = field(default_factory=dict)
    """The counts of `SpeculationStats` in generation.proto; empty if the server does not report them."""


Event: TypeAlias = Delivered | Ended


class BenchTarget(Protocol):
    """A server that is ready for requests."""

    @property
    def served(self) -> Served:
        """The server and the model that answer."""

    def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """The answer as it comes: `Delivered` at each delivery, `Ended` once.

        Raises:
            OutriderError: the request failed.
        """
