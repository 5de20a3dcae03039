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
"""The events in a session's outbox; None: the session is over."""
DraftStream: TypeAlias = Stream[Event]


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; the outbox gets `Admitted` or an error."""

    stream: DraftStream
    request: OpenDraft
    matcher: Matcher | None = None
    """The position in the grammar after the last token; None: the text has no grammar."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the target committed; `arrived` is in seconds of the engine's clock."""

    stream: DraftStream
    verdict: Verdict
    arrived: float


@dataclass(frozen=True, slots=True)
class Tell:
    """The target's features of a part of the text that the session was opened with."""

    stream: DraftStream
    part: PromptFeatures


@dataclass(frozen=True, slots=True)
class Close:
    """End a session. Unknown sessions have ended already, or were never admitted."""

    stream: DraftStream


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange the drafter's weights: call `apply` on the engine's thread."""

    apply: Callable[[], None]


Message: TypeAlias = Open | Commit | Tell | Close | Exchange
