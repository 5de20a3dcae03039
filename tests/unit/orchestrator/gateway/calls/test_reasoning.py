"""Reasoning in a model's output: the same, however the output is cut."""

from __future__ import annotations

import pytest

from orchestrator.gateway.calls.hermes import HermesParser
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from orchestrator.gateway.calls.reasoning import PlainText, ReasoningParser

BEGUN = "<|assistant|><think>\n"
"""A prompt whose template begins the reasoning."""
SKIPPED = "<|assistant|><think>\n\n</think>\n\n"
"""A prompt whose template leaves the reasoning out."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def put_together(pieces: list[Piece]) -> tuple[str, str, str]:
    """The reasoning, the text, and the calls."""
    reasoning = text = calls = ""
    for piece in pieces:
        match piece:
            case Reasoning():
                assert not text
                assert not calls
                reasoning += piece.text
            case Text():
                text += piece.text
            case CallBegun():
                calls += f"{piece.name} "
            case CallArguments():
                calls += piece.text
    return reasoning, text, calls


def read(prompt_end: str, *parts: str, tools: bool = False) -> tuple[str, str, str]:
    """An output that comes in parts."""
    parser = ReasoningParser(HermesParser() if tools else PlainText(), prompt_end)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return put_together([*pieces, *parser.finish()])


@pytest.mark.parametrize(
    ("prompt_end", "output", "reasoning", "answer"),
    [
        ("", "", "", ""),
        ("", "An answer.\n", "", "An answer.\n"),
        ("", " \n An answer.", "", " \n An answer."),
        (
            "",
            "\n<think>\nIs 1 < 2?\n\nYes </thinking>.\n</think>\n\nYes. \n",
            "Is 1 < 2?\n\nYes </thinking>.",
            "Yes. \n",
        ),
        ("", "<think></think>Yes.", "", "Yes."),
        ("", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("", "<think>so <think> twice</think>Yes. </think>", "so <think> twice", "Yes. </think>"),
        ("", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("", "<thinking>no</thinking>", "", "<thinking>no</thinking>"),
        ("", " <thin", "", " <thin"),
        ("", "<think>cut ", "cut", ""),
        ("", "<think>cut in the tag </thi", "cut in the tag </thi", ""),
        ("", "<think>so</think> \n", "so", ""),
        (BEGUN, "Well.\n</think>\n\nYes.", "Well.", "Yes."),
        (BEGUN, "\n\nWell, cut", "Well, cut", ""),
        (BEGUN, "", "", ""),
        (SKIPPED, "Yes.", "", "Yes."),
        ("no <think> here", "Yes.", "", "Yes."),
    ],
)
def test_reasoning_is_no_part_of_the_answer(
    prompt_end: str, output: str, reasoning: str, answer: str
) -> None:
    """In one part, in two at any place, and character by character; without the spaces around it."""
    expected = (reasoning, answer, "")
    assert read(prompt_end, output) == expected
    assert read(prompt_end, *output) == expected
    for at in range(len(output)):
        assert read(prompt_end, output[:at], output[at:]) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (f"<think>\nI call.\n</think>\n\n{CALL}", ("I call.", "", 'add {"a": 1}')),
        (f"<think>not {CALL}</think>Yes.", (f"not {CALL}", "Yes.", "")),
        (f"Well. {CALL}", ("", "Well.", 'add {"a": 1}')),
        (CALL, ("", "", 'add {"a": 1}')),
        ("<thi", ("", "<thi", "")),
    ],
)
def test_calls_are_looked_for_in_the_answer(output: str, expected: tuple[str, str, str]) -> None:
    """What looks like one within the reasoning is none."""
    assert read("", output, tools=True) == expected
    assert read("", *output, tools=True) == expected


def test_what_is_certain_is_passed_on_at_once() -> None:
    """Only spaces and what may be a tag wait."""
    parser = ReasoningParser(PlainText(), "")
    pushed = ["<thi", "nk>", "\n", "One ", "two", " </", "b> </th", "ink>", "\n", "An", " answer"]
    assert [put_together(parser.push(part))[:2] for part in pushed] == [
        *[("", "")] * 3,
        ("One", ""),
        (" two", ""),
        ("", ""),
        (" </b>", ""),
        *[("", "")] * 2,
        ("", "An"),
        ("", " answer"),
    ]
