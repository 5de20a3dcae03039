"""A verify replica drains: its sessions move with their keys and values, or without, and lose no token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.events import ConnectVerify, DropVerify, VerifyFailed, VerifyOpened
from outrider.protocol.errors import Draining, Overloaded, Unavailable
from outrider.protocol.messages import KvHandle, Opened, SamplingParams
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Answer, Rig
from tests.unit.orchestrator.test_session import kinds, only, session, started

MODES = [AUTO, SEQUENTIAL, OFF]
MOVABLE = replace(INFO, kv_layout="same")
COUNT = 40


def kept(length: int) -> KvHandle:
    """What a draining replica leaves."""
    return KvHandle("verify", "i", "id", length, b"digest", 0)


def test_a_session_takes_its_keys_along() -> None:
    """The next replica is opened with the handle, its owner, and what the handle covers; nothing was lost."""
    machine = started()
    drained = VerifyFailed(1, Draining("going"), "verify:1", kept(2))
    actions = machine.handle_event(drained, 1.0)
    assert kinds(actions) == [DropVerify, ConnectVerify]
    connect = only(actions, ConnectVerify)
    assert (connect.avoid, connect.owner, connect.covered) == ("verify:1", "verify:1", (1, 2))
    assert (connect.opening.kv_handle, connect.opening.token_ids) == (kept(2), (3, 10))
    assert connect.opening.first_step == 1
    assert machine.statistics.verify_losses == 0


@pytest.mark.parametrize("length", [0, 4, 5])
def test_a_handle_that_cannot_be_is_left(length: int) -> None:
    """It covers nothing, or leaves no token to compute."""
    actions = started().handle_event(VerifyFailed(1, Draining("going"), "verify:1", kept(length)), 1.0)
    opening = only(actions, ConnectVerify).opening
    assert (opening.kv_handle, opening.token_ids) == (None, (1, 2, 3, 10))


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_again() -> None:
    """What a handle covers gives none."""
    machine = session(sampling=SamplingParams(max_tokens=9, prompt_logprobs=0))
    machine.start(0.0)
    machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    actions = machine.handle_event(VerifyFailed(1, Draining("going"), "verify:1", kept(2)), 1.0)
    assert only(actions, ConnectVerify).opening.kv_handle is None


class Move:
    """A request on the first of two verify replicas, which drains in the middle of it."""

    def __init__(
        self, mode: int = OFF, info: Any = MOVABLE, second: Any = MOVABLE, stays: bool = False
    ) -> None:
        self.mode = mode
        self.stays = stays
        """The session goes on where it is."""
        self.first, self.second = FakeVerify(info), FakeVerify(second)
        self.drafts = [FakeDraft()] if mode != OFF else []

    async def run(self, rig: Rig, meanwhile: Callable[[], None] = lambda: None, **fields: Any) -> Answer:
        """Generate; six steps in, the replica that has the session is told to end, and steps no further until
        the session leaves."""
        for replica in (self.first, self.second):
            replica.patience = 0.005
            replica.hold.at = 6
        generating = asyncio.create_task(rig.generate(mode=self.mode, max_tokens=COUNT, **fields))
        await rig.until(lambda: not (self.first.hold.is_set() and self.second.hold.is_set()))
        if self.second.sessions:
            self.first, self.second = self.second, self.first
        self.second.hold.at = None
        meanwhile()
        draining = asyncio.create_task(self.first.drain())
        if self.stays:
            await rig.until(lambda: rig.metric("replicas", kind="verify", state="usable") == 1)
            self.first.hold.set()
        answer = await generating
        await draining
        self.first.server = None
        return answer


@pytest.mark.parametrize("mode", MODES)
async def test_a_draining_replica_hands_its_sessions_over(mode: int) -> None:
    """Before its grace period is over, with keys and values; the tokens are the target's."""
    move = Move(mode)
    async with Rig(move.first, move.second, *move.drafts) as rig:
        answer = await move.run(rig)
        assert answer.tokens[0] == continuation(PROMPT, COUNT)
        assert answer.completes[0].speculation.verify_losses == 0
        assert (move.first.fetched, move.second.stored) == (1, 1)
        (opening,) = move.second.openings
        assert opening.all_token_ids
        assert opening.kv_handle is not None
        assert opening.kv_handle.length == len(opening.token_ids) - 1
        assert opening.first_step > 0
        assert rig.metric("kv_moves_total", outcome="moved") == 1
        assert rig.metric("kv_moves_total", outcome="recomputed") == 0


async def test_an_owner_that_dies_in_the_middle_of_a_transfer() -> None:
    """The tokens are computed again at the new replica."""
    move = Move()
    async with Rig(move.first, move.second) as rig:

        def die() -> None:
            async def kill() -> None:
                server = move.first.server
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(server.server.stop(0)))
                await asyncio.Event().wait()

            move.first.before_pages = kill

        answer = await move.run(rig, die)
        assert answer.tokens[0] == continuation(PROMPT, COUNT)
        (opening,) = move.second.openings
        assert (opening.kv_handle, opening.all_token_ids) == (None, False)
        assert len(opening.token_ids) > len(PROMPT)
        assert rig.metric("kv_moves_total", outcome="recomputed") == 1


async def test_an_owner_that_refuses_to_give_them() -> None:
    """For whatever reason: the request goes on without."""
    move = Move()
    async with Rig(move.first, move.second) as rig:

        async def refuse() -> None:
            raise Unavailable("not now")

        def forbid() -> None:
            move.first.before_pages = refuse

        answer = await move.run(rig, forbid)
        assert answer.tokens[0] == continuation(PROMPT, COUNT)
        assert move.second.openings[0].kv_handle is None


@pytest.mark.parametrize("info", [(INFO, INFO), (MOVABLE, replace(INFO, kv_layout="other")), (MOVABLE, INFO)])
async def test_sessions_stay_where_nobody_takes_their_keys(info: tuple[Any, Any]) -> None:
    """Replicas that give none, or differ in layout: a session ends where it is, within the grace period."""
    move = Move(OFF, *info, stays=True)
    async with Rig(move.first, move.second) as rig:
        answer = await move.run(rig)
        assert answer.tokens[0] == continuation(PROMPT, COUNT)
        assert move.first.fetched == move.second.stored == 0
        assert not move.second.openings


async def test_the_next_turn_finds_its_keys_at_a_replica_that_is_full() -> None:
    """A ticket's replica has no room: another one fetches what it keeps."""
    replicas = FakeVerify(MOVABLE), FakeVerify(MOVABLE)
    async with Rig(*replicas) as rig:
        first = await rig.generate(mode=OFF, max_tokens=6, keep_session=True)
        owner = next(replica for replica in replicas if replica.handles)
        other = next(replica for replica in replicas if replica is not owner)
        owner.refuse = Overloaded("full")
        turn = (*PROMPT, *first.tokens[0], 5)
        session = first.completes[0].session
        answer = await rig.generate(turn, mode=OFF, max_tokens=6, session=session)
        assert answer.tokens[0] == continuation(turn, 6)
        assert owner.fetched == other.stored == 1
        assert other.openings[-1].all_token_ids
