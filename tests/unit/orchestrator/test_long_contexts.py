"""What the orchestrator does for a verdict depends on the verdict, not on how long the text is."""

from __future__ import annotations

from itertools import count

from orchestrator.events import VerdictArrived, VerifyOpened
from orchestrator.output import Output
from orchestrator.text.text_stream import TextStream
from outrider.protocol.messages import Mode, ModelInfo, Opened, SamplingParams, Verdict
from tests.allocations import usually_allocated
from tests.unit.orchestrator import test_session
from tests.unit.orchestrator.test_session import session

SHORT, LONG = 1_000, 32_000
KILOBYTE = 1024


def test_a_verdict_copies_nothing_of_the_text(monkeypatch) -> None:
    """The session takes its tokens and hands them on."""
    served = ModelInfo("target", "hash", vocabulary_size=100, context_length=40_960)
    monkeypatch.setattr(test_session, "SERVED", served)
    sizes = []
    for length in (SHORT, LONG):
        machine = session(Mode.OFF, sampling=SamplingParams(max_tokens=40_000))
        machine.start(0.0)
        machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
        machine.handle_event(VerdictArrived(1, Verdict(1, 3, (7,) * length)), 0.0)
        steps = count(2)

        def step(machine=machine, steps=steps) -> None:
            verdict = Verdict(next(steps), len(machine.committed), (7, 8, 9))
            machine.handle_event(VerdictArrived(1, verdict), 0.0)
            assert not machine.finished

        sizes.append(usually_allocated(step))
    assert sizes[1] < sizes[0] + 4 * KILOBYTE


def test_text_is_made_of_the_newest_tokens_alone() -> None:
    """However long the text is, with stop strings too, no more than a few tokens are decoded at a time."""
    longest = 0

    def decode(tokens) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return "".join(chr(97 + token % 26) for token in tokens)

    for stops in ((), ("zzz",)):
        output = Output(0, TextStream(decode, stops=stops))
        for start in range(0, LONG, 3):
            output.push((start, start + 1, start + 2), ())
        assert output.consumed >= LONG
    assert longest < 20
