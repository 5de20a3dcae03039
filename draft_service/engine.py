"""The draft engine: the shell around its core, and the calls that a stream may make."""

from __future__ import annotations

import time
from collections.abc import Callable

from draft_service.core import DraftCore
from draft_service.mailbox import Close, Commit, DraftStream, Exchange, Message, Open, Tell
from outrider.config import DraftConfig
from outrider.grammar.matcher import Matcher
from outrider.protocol.errors import Flood
from outrider.protocol.messages import OpenDraft, PromptFeatures, Verdict
from outrider.rpc.engine_shell import MAX_UNREAD, EngineShell
from outrider.rpc.queues import Deliver

PENDING_PER_SESSION = 64
"""Messages that may wait for the engine, for each session that may be open."""
SHARES = 8
"""One session may use one part in this many of the messages that may wait."""


class DraftEngine(EngineShell[DraftCore, Message]):
    """Drafts for all sessions with one drafter. Call all methods from the event loop."""

    def __init__(
        self,
        make_core: Callable[[Deliver], DraftCore],
        config: DraftConfig,
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        max_messages = PENDING_PER_SESSION * config.max_sessions
        super().__init__(make_core, max_messages, MAX_UNREAD, on_failure)
        self._max_pending_verdicts = max(PENDING_PER_SESSION, max_messages // SHARES)

    def open(self, request: OpenDraft, matcher: Matcher | None = None) -> DraftStream:
        """Ask for a session; its outbox gets `Admitted` or an error. Always `close` it.

        `matcher` is the position of the text in its grammar, if it has one.

        Raises:
            Overloaded: too many messages wait for the engine.
            Unavailable, InternalError: the engine has stopped or failed.
        """
        return self._open_stream(lambda stream: Open(stream, request, matcher))

    def verdict(self, stream: DraftStream, verdict: Verdict) -> None:
        """Tell a session what was committed.

        Raises:
            Flood: too many messages of this session wait for the engine.
            Overloaded: too many messages wait for the engine.
            Unavailable, InternalError: the engine has stopped or failed.
        """
        self._send(stream, Commit(stream, verdict, time.perf_counter()))

    def tell(self, stream: DraftStream, part: PromptFeatures) -> None:
        """Pass a session the target's features of its text.

        Raises:
            Flood, Overloaded, Unavailable, InternalError: see `verdict`.
        """
        self._send(stream, Tell(stream, part))

    def _send(self, stream: DraftStream, message: Commit | Tell) -> None:
        if stream.pending >= self._max_pending_verdicts:
            raise Flood("verdict: too many wait for the engine; open a new session with all tokens")
        self._post(message)
        stream.sent += 1

    def exchange(self, apply: Callable[[], None]) -> None:
        """Exchange the drafter's weights between two forwards; sessions go on."""
        self._tell(Exchange(apply))

    def close(self, stream: DraftStream) -> None:
        """End a session; its memory is free within one turn. The last call of every stream."""
        self._close_stream(stream, Close(stream))
