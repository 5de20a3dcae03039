"""A shadow of one session: a draft that gets every verdict, and whose proposals are only counted.

The session never waits for it. An error ends only the shadow, and is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from orchestrator.candidates import BlockCheck
from orchestrator.events import BlockArrived, Event
from orchestrator.replicas.draft_client import DraftClient
from orchestrator.replicas.stream import CLOSE_SECONDS
from orchestrator.shadow.comparison import Comparisons
from orchestrator.shadow.foresight import Foresight, Score
from outrider.protocol.allowance import Allowance
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import ModelInfo, OpenDraft, PromptFeatures, TokenBlock, Verdict
from outrider.telemetry.shadow_instruments import Role, ShadowInstruments


@dataclass(slots=True)
class _Draft:
    """A draft of the session: the version of its weights, and what it foresaw."""

    version: str
    foresight: Foresight


class Shadow:
    """Runs next to a session, from `opening` on."""

    def __init__(
        self,
        opening: OpenDraft,
        replica: ModelInfo,
        comparisons: Comparisons,
        instruments: ShadowInstruments,
    ) -> None:
        self._task_label = opening.task
        self._own = _Draft(replica.draft_name, Foresight(opening.token_ids))
        self._serving: dict[int, _Draft] = {}
        """The session's own drafts, by stream."""
        self._comparisons = comparisons
        self._instruments = instruments
        self._committed = len(opening.token_ids)
        self._check = BlockCheck.of_draft(0)
        self._check.allowance = Allowance.full()
        self._client = DraftClient(0, opening, self._receive)
        self._client.reads_features = replica.reads(opening.feature_layers)
        self._begun = False
        """True once the shadow has sent a block that is not empty. From then on it is compared with the
        session's drafts."""
        self._task: asyncio.Task[None] | None = None

    def start(
        self, endpoint: str, channel: grpc.aio.Channel, open_seconds: float, tasks: set[asyncio.Task[None]]
    ) -> None:
        """Open the stream, in a task that `tasks` holds until it has ended."""
        task = self._task = asyncio.create_task(self._run(endpoint, channel, open_seconds))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def draft_opened(self, stream: int, version: str, committed: Sequence[int]) -> None:
        """One of the session's own drafts opened."""
        self._serving[stream] = _Draft(version, Foresight(committed))

    def draft_ended(self, stream: int) -> None:
        """One of the session's own drafts is gone."""
        self._serving.pop(stream, None)

    def block(self, stream: int, block: TokenBlock) -> None:
        """One of the session's own drafts sent nodes."""
        if stream in self._serving:
            self._serving[stream].foresight.block(block)

    def features(self, part: PromptFeatures) -> None:
        """Send the shadow the target's features of a part of the text, if it reads them."""
        if self._runs:
            self._client.tell(part)

    def verdict(self, verdict: Verdict) -> None:
        """A step committed tokens: compare the drafts, and tell the shadow."""
        own = self._own.foresight.verdict(verdict.tokens)
        others = [(draft, draft.foresight.verdict(verdict.tokens)) for draft in self._serving.values()]
        self._committed += len(verdict.tokens)
        self._check.allowance.refill()
        if not self._runs:
            return
        if self._begun and others and verdict.draft_wanted:
            self._count(own, others)
        self._client.commit(verdict)

    def end(self) -> None:
        """The session has ended; returns at once."""
        if self._task is None or self._task.done():
            return
        self._client.close()
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._task.cancel)

    @property
    def _runs(self) -> bool:
        """True until the stream has ended."""
        return self._task is not None and not self._task.done()

    def _count(self, own: Score, others: Sequence[tuple[_Draft, Score]]) -> None:
        self._instruments.compared(self._task_label, self._own.version, Role.SHADOW, *own)
        for draft, score in others:
            self._instruments.compared(self._task_label, draft.version, Role.SERVING, *score)
            self._comparisons.add(self._own.version, draft.version, own, score)

    async def _run(self, endpoint: str, channel: grpc.aio.Channel, open_seconds: float) -> None:
        try:
            await self._client.run(endpoint, channel, open_seconds, may_be_silent=True)
        except OutriderError as error:
            self._instruments.failed(error.reason)
        except Exception as error:  # a bug must not cost the session anything either
            self._instruments.failed(type(error).__name__)

    async def _receive(self, event: Event) -> None:
        """Take in a message of the replica.

        Raises:
            InternalError, Flood: a sound draft cannot send this block; the stream ends.
        """
        if not isinstance(event, BlockArrived):
            return
        if error := self._check.error_of(event.block, self._committed):
            raise error
        self._begun = self._begun or not event.block.empty
        self._own.foresight.block(event.block)
