"""What an orchestrator serves while verify replicas with other models, weights and limits come and go."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orchestrator.replicas.served import Served, ServedModel, mismatch_of
from outrider.protocol.errors import ContextTooLong, ModelGone, UnknownModel
from outrider.protocol.messages import ModelInfo
from tests.fakes import INFO, FakeVerify, continuation
from tests.unit.orchestrator.rig import PROMPT, Answer, Rig

OTHER = replace(INFO, model="other")
OLD, NEW = replace(INFO, version="old"), replace(INFO, version="new")


async def test_limits_are_those_of_a_replica_that_is_there() -> None:
    """A replica that was started again with a shorter context and another end tells the new ones: what does
    not fit is refused, not cut short."""
    verify = FakeVerify()
    async with Rig(verify) as rig:
        verify.info = replace(verify.info, incarnation="2", context_length=30, eos_token_ids=(7,))
        await rig.until(lambda: rig.fleet.served is not None and rig.fleet.served.info == verify.info)
        with pytest.raises(ContextTooLong):
            await rig.generate(max_tokens=40)


async def test_limits_stay_while_a_replica_has_them() -> None:
    """One of two replicas changes its context: requests are checked as before."""
    first, second = FakeVerify(), FakeVerify()
    async with Rig(first, second) as rig:
        second.info = replace(second.info, incarnation="2", context_length=30)
        pool = rig.fleet.pools["verify"]
        await rig.until(lambda: pool.find(second.endpoint).info == second.info)  # type: ignore[union-attr]
        assert rig.fleet.served is not None
        assert rig.fleet.served.info.context_length == INFO.context_length


async def test_a_text_is_not_continued_with_other_weights() -> None:
    """A replica that comes back with other weights of the same name ends the texts that it had begun."""
    verify = FakeVerify(OLD)
    verify.hold.at = 3
    async with Rig(verify) as rig:
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: not verify.hold.is_set())
        verify.info = replace(verify.info, incarnation="2", version="new")
        await rig.until(lambda: rig.fleet.served is not None and rig.fleet.served.info == verify.info)
        verify.die_at_verdict, verify.hold.at = verify.verdicts, None
        verify.hold.set()
        with pytest.raises(UnknownModel, match="other weights"):
            await asking
        assert len(verify.openings) == 1
        assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


async def test_a_request_that_names_its_weights_waits_for_no_others() -> None:
    """The replica comes back with others while it waits for a place: what its caller has is of the old ones.
    A request that names none is served."""
    verify = FakeVerify(OLD)
    verify.hold.at = 3
    async with Rig(verify, max_running=1) as rig:
        first = asyncio.create_task(rig.generate())
        await rig.until(lambda: not verify.hold.is_set())
        named = asyncio.create_task(rig.generate(model_version="old"))
        unnamed = asyncio.create_task(rig.generate())
        await rig.until(lambda: rig.orchestrator.servicer.admission.queue.queued == 2)
        verify.info = replace(verify.info, incarnation="2", version="new")
        await rig.until(lambda: rig.fleet.served is not None and rig.fleet.served.info == verify.info)
        verify.hold.at = None
        verify.hold.set()
        results = await asyncio.gather(first, named, unnamed, return_exceptions=True)
        assert [type(result) for result in results[1:]] == [ModelGone, Answer]


async def test_a_text_is_not_continued_by_a_replica_that_was_not_probed_since_its_start() -> None:
    """It may have come back with other weights between two probes."""
    verify, expected = FakeVerify(OLD), continuation(PROMPT, 40)
    async with Rig(verify, discovery_seconds=60) as rig:
        assert (await rig.generate()).tokens[0] == expected
        verify.info = replace(verify.info, incarnation="2", version="new")
        with pytest.raises(ModelGone, match="other weights"):
            await rig.generate(model_version="old", resume_token_ids=expected[:17])
        verify.info = replace(verify.info, incarnation="3")
        assert (await rig.generate()).tokens[0] == expected


async def test_the_last_replica_of_a_model_takes_its_requests_with_it() -> None:
    """They end at once, and do not count against the replica of another model that is left."""
    first, second = FakeVerify(), FakeVerify(OTHER)
    async with Rig(first, second, recovery_seconds=30, breaker_failures=1) as rig:
        await rig.until(lambda: rig.metric("replicas", kind="verify", state="mismatched") == 1)
        assert rig.fleet.served is not None
        if rig.fleet.served.info.model == OTHER.model:
            first, second = second, first
        first.hold.at = 3
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: not first.hold.is_set())
        await first.kill()
        with pytest.raises(ModelGone, match="ask anew"):
            await asking
        assert second.openings == []
        assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (OTHER, "serves 'other', not 'fake'"),
        (replace(NEW, vocabulary_hash="other"), "serves 'fake' with another vocabulary"),
        (NEW, "serves 'fake' with other weights, or another tokenizer or chat template"),
    ],
)
def test_what_does_not_fit_is_named(other: ModelInfo, reason: str) -> None:
    """A model of the same name is not said to be another."""
    assert mismatch_of("verify", other, OLD) == reason


@pytest.mark.parametrize(
    ("served", "needs_weights", "goes_on"),
    [(OLD, True, True), (NEW, False, True), (NEW, True, False), (OTHER, False, False)],
)
def test_which_requests_go_on(served: object, needs_weights: bool, goes_on: bool) -> None:
    """With other weights those that do not need the old ones, with another model none."""
    found = Served({})
    found.model = ServedModel(served, None)  # type: ignore[arg-type]
    assert (found.gone(OLD, needs_weights) == "") is goes_on
