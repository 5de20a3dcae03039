"""The events of a session, and the actions that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import (
    FinishReason,
    KvHandle,
    OpenDraft,
    Opened,
    OpenVerify,
    PromptFeatures,
    PromptLogprobs,
    TokenBlock,
    TokenLogprob,
    Verdict,
)


@dataclass(slots=True)
class VerifyOpened:
    """A verify replica admitted the session."""

    stream: int
    opened: Opened
    endpoint: str


@dataclass(slots=True)
class VerdictArrived:
    """A verify step committed tokens."""

    stream: int
    verdict: Verdict


@dataclass(slots=True)
class PromptArrived:
    """Log probabilities of a part of the prompt."""

    stream: int
    part: PromptLogprobs


@dataclass(slots=True)
class FeaturesArrived:
    """The target's features of a part of the text that the session was opened with."""

    stream: int
    part: PromptFeatures


@dataclass(slots=True)
class VerifyFailed:
    """A verify stream ended or could not be opened; `endpoint` is empty when no replica was found."""

    stream: int
    error: OutriderError
    endpoint: str
    kept: KvHandle | None = None
    """Keys and values that this replica keeps for the next one to fetch."""


@dataclass(slots=True)
class DraftOpened:
    """A draft replica admitted the session."""

    stream: int
    opened: Opened
    endpoint: str
    may_be_silent: bool = False
    """The replica proposes only where it finds something, as a lookup does."""


@dataclass(slots=True)
class BlockArrived:
    """A draft sent nodes."""

    stream: int
    block: TokenBlock


@dataclass(slots=True)
class DraftFailed:
    """A draft stream ended or could not be opened; `endpoint` is empty when no replica was found."""

    stream: int
    error: OutriderError
    endpoint: str


Event = (
    VerifyOpened
    | PromptArrived
    | FeaturesArrived
    | VerdictArrived
    | VerifyFailed
    | DraftOpened
    | BlockArrived
    | DraftFailed
)


@dataclass(slots=True)
class ConnectVerify:
    """Open a stream to a verify replica, waiting for one from `not_before` until `give_up_at`."""

    stream: int
    opening: OpenVerify
    avoid: str = ""
    """Endpoint to use only when there is no other."""
    prefer: str = ""
    """Endpoint to use when possible."""
    owner: str = ""
    """Endpoint of the replica that has the keys and values of the opening's handle."""
    covered: tuple[int, ...] = ()
    """The tokens that the opening's handle covers."""
    not_before: float = 0.0
    give_up_at: float = 0.0


@dataclass(slots=True)
class ConnectDraft:
    """Open a stream to a draft replica; when none is available, the stream fails with `NoReplica`."""

    stream: int
    opening: OpenDraft
    avoid: str = ""


@dataclass(slots=True)
class DropVerify:
    """Cancel the verify stream and count `error` against its replica."""

    error: OutriderError


@dataclass(slots=True)
class DropDraft:
    """Cancel the draft stream and count `error` against its replica."""

    stream: int
    error: OutriderError


@dataclass(slots=True)
class ParkDraft:
    """End the draft stream without counting anything against its replica: no draft is wanted."""

    stream: int


@dataclass(slots=True)
class SendBlock:
    """Send nodes to the verify replica."""

    block: TokenBlock


@dataclass(slots=True)
class SendVerdict:
    """Tell the draft what was committed."""

    verdict: Verdict


@dataclass(slots=True)
class SendFeatures:
    """Send the target's features of a part of the text to the drafts that read them."""

    part: PromptFeatures


@dataclass(slots=True)
class Announce:
    """Tell the client that the continuation begins, with everything that it needs to resume it."""


@dataclass(slots=True)
class EmitPrompt:
    """Send log probabilities of the prompt to the client."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class Emit:
    """Send the verdict's tokens to the client."""

    verdict: Verdict


@dataclass(slots=True)
class Finish:
    """The continuation is complete."""

    reason: FinishReason


@dataclass(slots=True)
class Fail:
    """The request ends with this error."""

    error: OutriderError


Action = (
    ConnectVerify
    | ConnectDraft
    | DropVerify
    | DropDraft
    | ParkDraft
    | SendBlock
    | SendVerdict
    | SendFeatures
    | Announce
    | EmitPrompt
    | Emit
    | Finish
    | Fail
)
