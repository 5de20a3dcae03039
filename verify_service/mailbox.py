"""The messages between the event loop and the verify engine's thread.

Into the engine: a stream has at most MAX_PENDING_BLOCKS token blocks in the inbox (further ones are
dropped: they are only proposals); every other message is one or two per stream, or one per unary call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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
from verify_service.transfer.table import SetAside

MAX_PENDING_BLOCKS = 128
"""Token blocks of one session that the engine has not looked at yet."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over; `handle` when its keys and values were kept."""

    handle: KvHandle | None = None


Event: TypeAlias = Opened | PromptLogprobs | PromptFeatures | Verdict | Closed
"""What a session's outbox holds."""
VerifyStream: TypeAlias = Stream[Event]


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; the outbox gets `Opened` or an error."""

    stream: VerifyStream
    opening: OpenVerify
    matcher: Matcher | None = None
    """After the tokens that are generated already; None: the text has no grammar."""


@dataclass(frozen=True, slots=True)
class Propose:
    """A token block for a session; `arrived` in seconds of the engine's clock."""

    stream: VerifyStream
    block: TokenBlock
    arrived: float


@dataclass(frozen=True, slots=True)
class Close:
    """End a session; the outbox gets `Closed`. Unknown sessions are ended already."""

    stream: VerifyStream
    keep: bool = False
    move: bool = False
    """What is kept will be fetched at once."""


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Give up what a handle holds."""

    handle: KvHandle
    reply: Outbox[None]


@dataclass(frozen=True, slots=True)
class ForkKv:
    """Make a second handle."""

    handle: KvHandle
    reply: Outbox[KvHandle]


@dataclass(frozen=True, slots=True)
class LendKv:
    """Set what a handle holds aside for the transfer of this number, to be read."""

    number: int
    handle: KvHandle
    reply: Outbox[SetAside]


@dataclass(frozen=True, slots=True)
class ReserveKv:
    """Set pages for these tokens aside for the transfer of this number, to be written."""

    number: int
    tokens: tuple[int, ...]
    reply: Outbox[SetAside]


@dataclass(frozen=True, slots=True)
class KeepKv:
    """Pages are written: make a handle."""

    number: int
    reply: Outbox[KvHandle]


@dataclass(frozen=True, slots=True)
class DropKv:
    """A transfer is over. Unknown numbers are over already."""

    number: int


Message: TypeAlias = Open | Propose | Close | ReleaseKv | ForkKv | LendKv | ReserveKv | KeepKv | DropKv
