"""The messages between the event loop and the verify engine's thread.

The engine's inbox stays small. A stream has at most MAX_PENDING_BLOCKS token blocks in it; further blocks are
dropped, because they are only proposals. Of other messages there are one or two per stream, or one per unary
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import (
    KvHandle,
    Opened,
    OpenVerify,
    PromptFeatures,
    PromptLogprobs,
    TokenBlock,
    Verdict,
)
from outrider.rpc.queues import Outbox, Stream

MAX_PENDING_BLOCKS = 128
"""Most token blocks of one session that the engine has not read yet."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over. It has a `handle` if keys and values were kept."""

    handle: KvHandle | None = None


Event: TypeAlias = Opened | PromptLogprobs | PromptFeatures | Verdict | Closed
"""The events in a session's outbox."""
VerifyStream: TypeAlias = Stream[Event]


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; the outbox gets `Opened` or an error."""

    stream: VerifyStream
    opening: OpenVerify
    matcher: Matcher | None = None
    """The position in the grammar after the tokens generated so far; None: the text has no grammar."""


@dataclass(frozen=True, slots=True)
class Propose:
    """A token block for a session; `arrived` is in seconds of the engine's clock."""

    stream: VerifyStream
    block: TokenBlock
    arrived: float


@dataclass(frozen=True, slots=True)
class Close:
    """End a session; the outbox gets `Closed`. Unknown sessions have ended already."""

    stream: VerifyStream
    keep: bool = False
    move: bool = False
    """True if another replica will fetch the kept sequence at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Work for the engine thread between two steps; the reply gets its result, or the error it raised."""

    work: Callable[[], object]
    reply: Outbox[Any]


Message: TypeAlias = Open | Propose | Close | Ask
