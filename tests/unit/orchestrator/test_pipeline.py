"""What a pipeline does of what its session wants."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.events import Action, ConnectDraft, ConnectVerify, Emit, Event, Finish, ParkDraft
from orchestrator.pipeline import Pipeline
from outrider.protocol.messages import FinishReason, OpenDraft, OpenVerify, SamplingParams, Verdict
from tests.unit.orchestrator.rig import run

GREEDY = SamplingParams()
OPEN: dict[str, Any] = {"request_id": "r", "token_ids": (1,), "prompt_length": 1, "sampling": GREEDY}
AFTER = [ConnectDraft(2, OpenDraft(**OPEN)), ParkDraft(2), Finish(FinishReason.LENGTH)]


class ScriptedSession:
    """A session that wants a list of things at its start, and ends at a stop string."""

    request = SimpleNamespace(prompt=(1,), keep_session=False, served=None)
    needs_weights = False

    def __init__(self, wants: list[Action]) -> None:
        self.wants = wants

    def start(self, now: float, stopped: bool = False) -> list[Action]:
        """Everything."""
        return self.wants

    def handle_event(self, event: Event, now: float) -> list[Action]:
        """Nothing."""
        return []

    def stop(self) -> list[Action]:
        """The text has reached a stop string."""
        return [Finish(FinishReason.STOP)]


class StoppingOutput:
    """Any text reaches a stop string."""

    index, stop = 0, ""

    def push(self, tokens: object, logprobs: object, step: object) -> list[Any]:
        """It is reached."""
        self.stop = "stop"
        return []


class EmptyFleet:
    """No replica can be used; counts who asks for a draft."""

    def __init__(self) -> None:
        self.drafts = 0
        self.pools = dict.fromkeys(("verify", "draft"))

    async def reserve_verify(self, *arguments: Any, **options: Any) -> Any:
        """There never is one."""
        await asyncio.Event().wait()

    def reserve_draft(self, *arguments: Any) -> None:
        """There is none now."""
        self.drafts += 1


class SilentMonitor:
    """Counts nothing."""

    @property
    def observer(self) -> SilentMonitor:
        """Neither does this."""
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.mark.parametrize("after", AFTER)
def test_nothing_follows_a_stop_string(after: Action) -> None:
    """What the session wanted after the text that ended it is not done: no draft is connected or let go, and
    the stop string is the reason."""

    async def scenario() -> None:
        verify = ConnectVerify(1, OpenVerify(model="m", **OPEN))
        session = ScriptedSession([verify, Emit(Verdict(1, 1, (5,))), after])
        fleet, emitted = EmptyFleet(), []

        async def emit(item: object) -> None:
            emitted.append(item)

        async def on_end(handle: object) -> None:
            assert handle is None

        parts: Any = (session, StoppingOutput(), fleet, emit, SilentMonitor())
        pipeline = Pipeline(*parts, draft_open_seconds=1.0)
        await pipeline.run(on_end)
        assert (pipeline.reason, fleet.drafts, emitted) == (FinishReason.STOP, 0, [])

    run(scenario)
