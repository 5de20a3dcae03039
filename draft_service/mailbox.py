"""What crosses between the event loop and the draft engine's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import OpenDraft, TokenBlock, Verdict
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
class Close:
    """End a session. Unknown sessions are ended already, or were never admitted."""

    stream: DraftStream


Message: TypeAlias = Open | Commit | Close
