"""Constraints at the orchestrator: checked aside before anything is asked of a replica, and passed on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orchestrator.request import constraints
from orchestrator.request.constraints import Constraints
from orchestrator.request.resolver import IncomingRequest
from orchestrator.text.constraint_check import ConstraintCheck
from outrider.protocol.constraint import Constraint, ConstraintKind
from outrider.protocol.errors import DeadlineExceeded, InvalidRequest
from outrider.protocol.messages import FinishReason, SamplingParams
from outrider.v1 import tokens_pb2
from tests.fakes import INFO, FakeVerify
from tests.unit.orchestrator.rig import Rig, until
from tests.unit.orchestrator.test_service import Never, text_verify
from tests.unit.orchestrator.text.test_text_stream import byte_level

END = 99


def constraint(*texts: str, kind: ConstraintKind = ConstraintKind.CHOICE) -> Constraint:
    """A choice, unless said otherwise."""
    return Constraint(kind, texts)


def complete(check: ConstraintCheck) -> bool:
    """What the other process finds, here."""
    return check.complete(byte_level())


def encoded(text: str) -> tuple[int, ...]:
    """Token ids."""
    return byte_level().encode(text)


def test_a_sound_constraint_has_no_text_yet() -> None:
    """Nor is a beginning complete; a whole text is, with or without an end token."""
    assert not complete(ConstraintCheck(constraint("hello", "hell no")))
    assert not complete(ConstraintCheck(constraint("hello", "hell no"), encoded("hell")))
    assert complete(ConstraintCheck(constraint("hello"), encoded("hello")))
    either = constraint("hello", "hello hello")
    assert not complete(ConstraintCheck(either, encoded("hello"), (END,)))
    assert complete(ConstraintCheck(either, (*encoded("hello"), END), (END,)))


def test_a_token_that_does_not_follow_is_named() -> None:
    """The first one; what follows a whole text does not either."""
    for text in ("help", "hello hello"):
        with pytest.raises(InvalidRequest, match=r"resume_token_ids\[\d+\]: does not follow sampling.choice"):
            complete(ConstraintCheck(constraint("hello"), encoded(text)))


@pytest.mark.parametrize(
    "sampling",
    [
        {"json_schema": '{"type": "objec"}'},
        {"regex": "("},
        {"choice": tokens_pb2.Choice(texts=["a", ""])},
        {
            "grammar": "start: r0\n"
            + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(5000))
            + 'r5000: "x"'
        },
    ],
    ids=lambda value: next(iter(value)),
)
async def test_a_wrong_constraint_costs_nothing_but_the_check(sampling: dict[str, object]) -> None:
    """No place, no replica; also where the library ends its process. The next request is served."""
    async with Rig(verify := text_verify()) as rig:
        with pytest.raises(InvalidRequest) as failure:
            await rig.generate(text="x", **sampling)
        assert failure.value.field == f"sampling.{next(iter(sampling))}"
        assert not verify.openings
        assert rig.metric("requests_rejected_total", reason="INVALID_REQUEST") == 1
        assert (await rig.generate(text="x", regex="a+", max_tokens=3)).completes
        assert verify.openings[0].sampling.constraint == constraint("a+", kind=ConstraintKind.REGEX)


async def test_without_a_tokenizer_constraints_are_refused() -> None:
    """In a sentence that says why."""
    async with Rig(FakeVerify()) as rig:
        with pytest.raises(InvalidRequest, match=r"sampling.regex: .*without a tokenizer"):
            await rig.generate(regex="a+")


async def test_a_whole_text_is_not_resumed() -> None:
    """It ends at once, with the reason that it had, and no replica is asked."""
    async with Rig(verify := text_verify()) as rig:
        whole = {"choice": tokens_pb2.Choice(texts=["abc"]), "resume_token_ids": encoded("abc")}
        answer = await rig.generate(text="x", **whole)
        assert answer.completes[0].finish_reason == FinishReason.STOP
        assert not verify.openings


class Process:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[ConstraintCheck] = []
        self.go = asyncio.Event()
        self.go.set()

    async def checked(self, check: ConstraintCheck, tokenizer: object, positions: int) -> bool:
        """Of `Tokenizing`."""
        self.asked.append(check)
        await self.go.wait()
        if "wrong" in check.constraint.texts:
            raise InvalidRequest(check.field, "is wrong")
        return False


def asked(*texts: str, resumed: tuple[int, ...] = ()) -> IncomingRequest:
    """A request with a choice."""
    return IncomingRequest(sampling=SamplingParams(constraint=constraint(*texts)), resume_token_ids=resumed)


async def test_what_was_sound_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what was wrong is, and resumed tokens are; only so many are remembered."""
    monkeypatch.setattr(constraints, "MAX_REMEMBERED", 2)
    found = Constraints(process := Process())

    async def check(one: IncomingRequest) -> None:
        await found.complete(one, byte_level(), INFO)

    for one in (asked("a"), asked("a"), asked("b"), asked("a"), asked("c"), asked("a"), asked("b")):
        await check(one)
    assert [each.constraint.texts for each in process.asked] == [("a",), ("b",), ("c",), ("b",)]
    await check(asked("a", resumed=(1,)))
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await check(asked("wrong"))
    assert len(process.asked) == 7
    await check(replace(asked("a"), sampling=SamplingParams()))
    assert len(process.asked) == 7


async def test_a_check_ends_at_the_deadline() -> None:
    """The caller does not wait longer for it than for a text."""
    async with Rig(text_verify()) as rig:
        rig.orchestrator.servicer.checking._start = Never().start
        with pytest.raises(DeadlineExceeded):
            await rig.generate(text="x", regex="a+", deadline=0.3)
        await until(lambda: not rig.orchestrator.running())
