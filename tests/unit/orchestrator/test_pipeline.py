"""What a pipeline does of what its session wants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.events import (
    Action,
    ConnectDraft,
    ConnectVerify,
    DraftOpened,
    Emit,
    Event,
    Finish,
    ParkDraft,
    VerdictArrived,
)
from orchestrator.observing.monitor import SessionMonitor
from orchestrator.observing.tracing import StepSpans
from orchestrator.pipeline import Pipeline
from orchestrator.replicas.pool import Replica, Replicas, Reservation
from orchestrator.replicas.verify_client import VerifyClient
from outrider.protocol.constraint import Constraint, ConstraintKind
from outrider.protocol.errors import NoReplica
from outrider.protocol.messages import (
    FinishReason,
    KvHandle,
    OpenDraft,
    Opened,
    OpenVerify,
    SamplingParams,
    Verdict,
)
from tests.unit.orchestrator.observing.test_observer import Bench, verdict

GREEDY = SamplingParams()
OPEN: dict[str, Any] = {"request_id": "r", "token_ids": (1,), "prompt_length": 1, "sampling": GREEDY}
AFTER = [ConnectDraft(2, OpenDraft(**OPEN)), ParkDraft(2), Finish(FinishReason.LENGTH)]


class ScriptedSession:
    """A session that wants lists of things at its start and at a verdict, and ends at a stop string."""

    request = SimpleNamespace(prompt=(1,), keep_session=False, served=None)
    needs_weights = False
    committed = (1,)

    def __init__(self, wants: list[Action], at_verdict: Sequence[Action] = ()) -> None:
        self.wants = wants
        self.at_verdict = [*at_verdict]

    def start(self, now: float, stopped: bool = False) -> list[Action]:
        """Everything."""
        return self.wants

    def handle_event(self, event: Event, now: float) -> list[Action]:
        """What is wanted at a verdict, and otherwise nothing."""
        return self.at_verdict if isinstance(event, VerdictArrived) else []

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


class KeepingFleet(EmptyFleet):
    """Its verify replica has kept keys and values, because it drained."""

    def __init__(self) -> None:
        super().__init__()
        self.has_kept = asyncio.Event()

    async def reserve_verify(self, served: object, prompt: object, on_lost: Any, **options: Any) -> Any:
        """The stream to it does not end."""
        on_lost.__self__.kept = KvHandle("verify", "1", "kv-0", 1, b"", 0)
        self.has_kept.set()
        await asyncio.Event().wait()


class LostFleet(EmptyFleet):
    """Has two drafts, to which there is no channel."""

    def __init__(self) -> None:
        super().__init__()
        self.pools["draft"] = Replicas(3, 60.0)
        self.free = [Replica("draft:3"), Replica("draft:2")]

    def reserve_draft(self, *arguments: Any) -> Reservation:
        """One of them."""
        return Reservation(self.free.pop(), lambda error: None)

    def channel(self, kind: str, endpoint: str) -> Any:
        """There is none."""
        raise NoReplica(endpoint)

    def admitted(self, *arguments: Any) -> None:
        """It is well."""


class SilentMonitor:
    """Counts nothing."""

    @property
    def observer(self) -> SilentMonitor:
        """Neither does this."""
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.mark.parametrize("after", AFTER)
async def test_nothing_follows_a_stop_string(after: Action) -> None:
    """What the session wanted after the text that ended it is not done: no draft is connected or let go, and
    the stop string is the reason."""
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


async def test_steps_are_not_counted_for_a_draft_that_was_parked() -> None:
    """They are counted for the one that stays."""
    connect = [ConnectDraft(stream, OpenDraft(**OPEN)) for stream in (2, 3)]
    session: Any = ScriptedSession(connect, [ParkDraft(2), Finish(FinishReason.LENGTH)])
    bench = Bench()
    observer = bench.watch()
    monitor = SessionMonitor(session, observer, None, StepSpans(), lambda session: None, lambda: 0.0)

    async def on_end(handle: object) -> None:
        observer.verdict(verdict(1), 0.0)

    parts: Any = (session, SimpleNamespace(stop="", flush=lambda: None), LostFleet(), None, monitor)
    pipeline = Pipeline(*parts, draft_open_seconds=1.0)
    for stream in (2, 3):
        await pipeline._received(DraftOpened(stream, Opened("d", "i"), f"draft:{stream}"))
    await pipeline._received(VerdictArrived(1, verdict(1)))
    await pipeline.run(on_end)
    assert bench.value("steps_total", task="code", draft="draft:3") == 1


async def test_keys_kept_for_a_move_are_no_session_for_the_caller() -> None:
    """A text that ends while it leaves a draining replica has a session only if the caller asked for one."""
    connect: list[Action] = [ConnectVerify(1, OpenVerify(model="m", **OPEN))]
    session, fleet = ScriptedSession(connect, [Finish(FinishReason.LENGTH)]), KeepingFleet()
    kept: list[object] = []

    async def on_end(handle: object) -> None:
        kept.append(handle)

    output = SimpleNamespace(stop="", flush=lambda: None)
    parts: Any = (session, output, fleet, None, SilentMonitor())
    pipeline = Pipeline(*parts, draft_open_seconds=1.0)
    running = asyncio.create_task(pipeline.run(on_end))
    await fleet.has_kept.wait()
    await pipeline._received(VerdictArrived(1, verdict(1)))
    await running
    assert kept == [None]


@pytest.mark.parametrize("constraint", [None, Constraint(ConstraintKind.REGEX, ("a*",))])
async def test_a_grammar_goes_through_all_tokens(constraint: Constraint | None) -> None:
    """A session that comes back to the replica which has its keys sends the other tokens alone, unless there
    is a grammar."""
    handle = KvHandle("verify", "1", "kv-0", 2, b"", 0)
    sampling = SamplingParams(constraint=constraint)
    opening = OpenVerify(model="m", kv_handle=handle, **OPEN | {"token_ids": (7,), "sampling": sampling})
    action = ConnectVerify(1, opening, owner="verify:1", covered=(1, 6))
    client = VerifyClient(1, opening, lambda event: asyncio.sleep(0))
    parts: Any = (ScriptedSession([]), None, EmptyFleet(), None, SilentMonitor())
    await Pipeline(*parts, draft_open_seconds=1.0)._bring_keys(client, "verify:1", action)
    sent = client._first.open
    assert list(sent.token_ids) == ([7] if constraint is None else [1, 6, 7])
    assert sent.all_token_ids is (constraint is not None)
    assert sent.kv_handle.length == 2
