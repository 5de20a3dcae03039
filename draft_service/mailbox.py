"""The messages between the event loop and the draft engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import OpenDraft, PromptFeatures, TokenBlock, Verdict
from outrider.rpc.queues import Stream


@dataclass(frozen=True, slots=True)
class Admitted:
    """The session is open; `cached_length` of its tokens needed no computing."""

    cached_length: int


Event: TypeAlias = Admitted | TokenBlock | None
"""What a session's outbox holds; None: it is over."""
DraftStream: TypeAlias = Stream[Event]


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; the outbox gets `Admitted` or an error."""

    stream: DraftStream
    request: OpenDraft
    matcher: Matcher | None = None
    """At the last token; None: the text has no grammar."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the target committed; `arrived` in seconds of the engine's clock."""

    stream: DraftStream
    verdict: Verdict
    arrived: float


@dataclass(frozen=True, slots=True)
class Tell:
    """What the target made of a part of the text that the session was opened with."""

    stream: DraftStream
    part: PromptFeatures


@dataclass(frozen=True, slots=True)
class Close:
    """End a session. Unknown sessions are ended already, or were never admitted."""

    stream: DraftStream


@dataclass(frozen=True, slots=True)
class Exchange:
    """The drafter gets other weights: `apply` gives them to it, on the engine's thread."""

    apply: Callable[[], None]


Message: TypeAlias = Open | Commit | Tell | Close | Exchange
