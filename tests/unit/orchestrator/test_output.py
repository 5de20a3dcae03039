"""Chunks of tokens whose steps the caller wants to see."""

from __future__ import annotations

from orchestrator.observing.timeline import Step, StepRecorder
from orchestrator.output import Chunk, Output
from orchestrator.text.text_stream import TextStream
from outrider.protocol.messages import Origin, StepNodes, Verdict

DRAFT, TARGET = Origin.DRAFT, Origin.TARGET
SPELLED = {1: b"a", 2: b"b", 3: "\u00e9".encode()[:1], 4: "\u00e9".encode()[1:]}


def decode(tokens: object) -> str:
    """Bytes of each token, as text."""
    return b"".join(SPELLED[token] for token in tokens).decode(errors="replace")  # type: ignore[attr-defined]


def step(number: int, *tokens: int) -> Step:
    """A step that accepted all of these tokens but the last."""
    drafted = tokens[:-1]
    nodes = StepNodes(drafted, tuple(range(-1, len(drafted) - 1)), (DRAFT,) * len(drafted))
    verdict = Verdict(number, 1, tokens, accepted=len(drafted), nodes=nodes)
    return StepRecorder(0).add_verdict(verdict, 0)


def test_each_token_is_a_chunk_with_its_origin() -> None:
    """The step comes with the first of them."""
    first = step(1, 1, 2)
    chunks = Output(0, TextStream(decode)).push((1, 2), (), first)
    assert chunks == [Chunk(0, "a", (1,), (), (DRAFT,), first), Chunk(0, "b", (2,), (), (TARGET,))]


def test_the_tokens_of_one_character_stay_together() -> None:
    """Each keeps its origin, though they come from two steps; a step is told when it has been made."""
    output = Output(0, TextStream(decode))
    before, after = step(1, 3), step(2, 4, 1)
    assert output.push((3,), (), before) == [Chunk(0, "", (), step=before)]
    accented, plain = output.push((4, 1), (), after)
    assert accented == Chunk(0, "\u00e9", (3, 4), (), (TARGET, DRAFT), after)
    assert plain == Chunk(0, "a", (1,), (), (TARGET,))


def test_nothing_follows_a_stop_string() -> None:
    """The tokens behind it are no part of the text."""
    output = Output(0, TextStream(decode, stops=("b",)))
    chunks = output.push((1, 2, 1), (), step(1, 1, 2, 1))
    assert "".join(chunk.text for chunk in chunks) == "a"
    assert output.stop == "b"


def test_without_a_step_a_verdict_is_one_chunk() -> None:
    """Nothing is told that was not asked for."""
    assert Output(0, TextStream(decode)).push((1, 2), ()) == [Chunk(0, "ab", (1, 2))]
