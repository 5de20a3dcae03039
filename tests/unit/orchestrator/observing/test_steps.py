"""What a verdict tells of its step."""

from __future__ import annotations

from orchestrator.observing.timeline import Lane, Step, StepRecorder
from outrider.protocol.messages import Origin, StepNodes, StepTimes, TokenBlock, Verdict

DRAFT, LOOKUP, TARGET = Origin.DRAFT, Origin.LOOKUP, Origin.TARGET
NODES = StepNodes((5, 6, 7, 6), (-1, 0, 0, 1), (DRAFT, DRAFT, LOOKUP, LOOKUP))


def told(*tokens: int, accepted: int, nodes: StepNodes | None = NODES) -> Step:
    """The step of a verdict with these tokens."""
    return StepRecorder(0).add_verdict(Verdict(3, 10, tokens, accepted=accepted, nodes=nodes), 0)


def test_accepted_tokens_have_their_nodes_origin_and_the_last_is_the_targets() -> None:
    """The walk goes down the tree; equal tokens elsewhere are not on it."""
    step = told(5, 6, 6, 9, accepted=3)
    assert (step.verdict.step, step.accepted, step.bonus) == (3, [0, 1, 3], 9)
    assert step.origins == [DRAFT, DRAFT, LOOKUP, TARGET]
    assert told(5, 7, 9, accepted=2).origins == [DRAFT, LOOKUP, TARGET]


def test_a_text_may_end_at_an_accepted_node() -> None:
    """Then the target chose no token of its own."""
    step = told(5, 6, accepted=2)
    assert (step.accepted, step.bonus, step.origins) == ([0, 1], None, [DRAFT, DRAFT])


def test_tokens_without_nodes_are_the_targets() -> None:
    """As of a step that verified none, or of a replica that tells none."""
    assert told(9, accepted=0).origins == [TARGET]
    assert told(5, 6, accepted=1, nodes=None).origins == [TARGET, TARGET]


def test_a_step_has_the_bars_since_the_step_before() -> None:
    """Of draft, wire and target; the timeline of the request keeps them all."""
    recorder = StepRecorder(0)
    times = StepTimes(forward_start_unix_nano=5_000, forward_micros=2, sample_micros=1)
    for step in (1, 2):
        recorder.add_block(
            TokenBlock(0, (-1,), (5,), (0.5,), expand_start_unix_nano=1_000, expand_micros=1), 3_000
        )
        record = recorder.add_verdict(Verdict(step, 1, (5,), times=times), 9_000)
        bars = [(bar.lane, bar.step) for bar in record.events]
        assert bars == [(Lane.DRAFT, step), (Lane.WIRE, step), (Lane.VERIFY, step), (Lane.WIRE, step)]
    assert len(recorder.events) == 8


def test_the_bars_of_a_step_are_bounded() -> None:
    """The last ones are kept, so that the target's is among them."""
    recorder = StepRecorder(0)
    for _ in range(200):
        recorder.add_block(TokenBlock(0, (-1,), (5,), (0.5,), expand_start_unix_nano=1_000), 3_000)
    verdict = Verdict(1, 1, (5,), times=StepTimes(forward_start_unix_nano=5_000))
    events = recorder.add_verdict(verdict, 9_000).events
    assert (len(events), events[-2].lane) == (128, Lane.VERIFY)
