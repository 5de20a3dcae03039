"""Calls in a model's output: the same ones, however the output is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from orchestrator.gateway.calls.argument_types import ArgumentTypes
from orchestrator.gateway.calls.call_reader import CallParser
from orchestrator.gateway.calls.call_tags import CallTags
from orchestrator.gateway.calls.hermes import HermesParser
from orchestrator.gateway.calls.llama3 import Llama3Parser
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun, Piece, Text
from outrider.client import Tool

Read = tuple[str, list[tuple[str, str]]]
"""The text, and each call's name and arguments."""


def hermes() -> CallParser:
    """With any function."""
    return HermesParser()


def llama3() -> CallParser:
    """Offered: add and now."""
    return Llama3Parser({"add", "now"}.__contains__)


SCHEMA = {
    "$defs": {"day": {"enum": ["mon", "tue"]}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "d": {"$ref": "#/$defs/day"},
        "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "m": {"type": ["string", "null"]},
        "loop": {"$ref": "#/$defs/loop"},
    },
}


TYPES = ArgumentTypes([Tool("f", "", json.dumps(SCHEMA))])


def tagged() -> CallParser:
    """Offered: f."""
    return HermesParser(lambda: CallTags(TYPES))


def put_together(pieces: list[Piece]) -> Read:
    """What a caller has at the end; a call's arguments come after its beginning, calls one after another."""
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Text():
                text += piece.text
            case CallBegun():
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            case CallArguments():
                assert piece.index == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + piece.text)
    return text, calls


def read(make: Callable[[], CallParser], *parts: str) -> Read:
    """An output that comes in parts."""
    parser = make()
    pieces = [piece for part in parts for piece in parser.push(part)]
    return put_together([*pieces, *parser.finish()])


A = '{"a": 1, "b": "}<\\"é"}'
ADD = f'{{"name": "add", "arguments": {A}}}'
NOW = '{"arguments" : {} , "name": "now"}'
HERMES: list[tuple[str, Read]] = [
    ("", ("", [])),
    ("Hello, <b>you</b> \n", ("Hello, <b>you</b> \n", [])),
    (f"<tool_call>\n{ADD}\n</tool_call>", ("", [("add", A)])),
    (f"Let me see.\n\n<tool_call>{ADD}</tool_call>\n", ("Let me see.", [("add", A)])),
    (
        f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
        ("", [("add", A), ("now", "{} ")]),
    ),
    (f"<tool_call>{ADD}\n<tool_call>{NOW}", ("", [("add", A), ("now", "{} ")])),
    (f"a <tool_call>{ADD}</tool_call> b", ("a b", [("add", A)])),
    (f"<<tool_call>{ADD}</tool_call>", ("<", [("add", A)])),
    ('<tool_call>{"name": "f", "id": [1, {"x": "]"}], "arguments": [2]}', ("", [("f", "[2]")])),
    ("<tool_call>none</tool_call> x", ("<tool_call>none</tool_call> x", [])),
    ('a <tool_call>{"name": "f"}</tool_call>', ('a <tool_call>{"name": "f"}</tool_call>', [])),
    ('<tool_call>{"name": 3, "arguments": {}}', ('<tool_call>{"name": 3, "arguments": {}}', [])),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    ('<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', [])),
    ("half a tag <tool_", ("half a tag <tool_", [])),
    (f"<tool_call>{ADD}</tool_", ("", [("add", A)])),
    (
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {"x": 1}, "name": "g"}',
        ("", [("f", "{}")]),
    ),
    ('<tool_call>{"name": "\\u0066", "parameters": {}}</tool_call>', ("", [("f", "{}")])),
]
CALL = '{"name": "add", "parameters": {"a": 1}}'
LLAMA3: list[tuple[str, Read]] = [
    ("", ("", [])),
    ("  Hello {you}; ", ("  Hello {you}; ", [])),
    (CALL, ("", [("add", '{"a": 1}')])),
    (f"<|python_tag|>{CALL}", ("", [("add", '{"a": 1}')])),
    (f"\n<|python_tag|> {CALL}\n", ("", [("add", '{"a": 1}')])),
    (f"{CALL}; {CALL}", ("", [("add", '{"a": 1}'), ("add", '{"a": 1}')])),
    (f'{{"type": "function", {CALL[1:]}', ("", [("add", '{"a": 1}')])),
    (f"{CALL} and so on {CALL}", (f" and so on {CALL}", [("add", '{"a": 1}')])),
    ('{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ('{"name": "Bob", "parameters": {}} x', ('{"name": "Bob", "parameters": {}} x', [])),
    (f'{CALL}; {{"name": "Bob"}}', ('; {"name": "Bob"}', [("add", '{"a": 1}')])),
    ("{}", ("{}", [])),
    ("{a: 1}", ("{a: 1}", [])),
    ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("<|python", ("<|python", [])),
    ('{"name": "now", "parameters": {}', ("", [("now", "{}")])),
    ("[1]", ("[1]", [])),
]


def tags(name: str, *parameters: tuple[str, str]) -> str:
    """A call as Qwen 3 Coder writes it."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


TAGGED: list[tuple[str, Read]] = [
    ("Hello, <b>you</b>", ("Hello, <b>you</b>", [])),
    (tags("f"), ("", [("f", "{}")])),
    ("Well.\n" + tags("f", ("n", "5")), ("Well.", [("f", '{"n": 5}')])),
    (tags("f", ("s", "5")) + "\n" + tags("g"), ("", [("f", '{"s": "5"}'), ("g", "{}")])),
    (tags("f", ("s", '\n a "é"\n</b>\n')), ("", [("f", '{"s": "\\n a \\"é\\"\\n</b>\\n"}')])),
    (tags("f", ("d", "mon"), ("n", "-1")), ("", [("f", '{"d": "mon", "n": -1}')])),
    (tags("f", ("o", '{"a": [1]}')), ("", [("f", '{"o": {"a": [1]}}')])),
    (tags("f", ("o", "None"), ("m", "null")), ("", [("f", '{"o": null, "m": null}')])),
    (tags("f", ("m", "x"), ("n", "many")), ("", [("f", '{"m": "x", "n": "many"}')])),
    (tags("f", ("n", "1e999"), ("o", '["\\\\ud800"]')), ("", [("f", '{"n": 1e999, "o": ["\\\\ud800"]}')])),
    (tags("f", ("n", "NaN")), ("", [("f", '{"n": "NaN"}')])),
    (tags("f", ("loop", "1"), ("other", "2")), ("", [("f", '{"loop": "1", "other": "2"}')])),
    (tags("f", ("n", "1"), ("n", "2")), ("", [("f", '{"n": 1}')])),
    (
        "<tool_call><function=f><parameter=n>1</parameter></function> x",
        (" x", [("f", '{"n": 1}')]),
    ),
    (tags("f", ("s", "a</parameter>\nb</parameter")), ("", [("f", '{"s": "a</parameter>\\nb</parameter"}')])),
    (
        tags("f", ("o", '{"</parameter> <": "</parameter></"}')),
        ("", [("f", '{"o": {"</parameter> <": "</parameter></"}}')]),
    ),
    (tags("f", ("s", "</parameter>"), ("n", "1")), ("", [("f", '{"s": "</parameter>", "n": 1}')])),
    (
        "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</tool_call> x",
        (" x", [("f", '{"n": 5}')]),
    ),
    ("<tool_call>\n<function=f>\n<parameter=n>\n5\n</para", ("", [("f", "")])),
    ("<tool_call>\n<function=f", ("<tool_call>\n<function=f", [])),
    ("<tool_call>\n<function=>\n", ("<tool_call>\n<function=>\n", [])),
    ("<tool_call>\n<function=f\n>", ("<tool_call>\n<function=f\n>", [])),
    ('<tool_call>{"name": "f", "arguments": {}}', ('<tool_call>{"name": "f", "arguments": {}}', [])),
]
CASES = [(hermes, *case) for case in HERMES] + [(llama3, *case) for case in LLAMA3]
CASES += [(tagged, *case) for case in TAGGED]
SHORT_PART = 3
"""Signs of a part between two cuts that may both be within one tag."""


def check_cuts(make: Callable[[], CallParser], output: str, expected: Read, every: int) -> None:
    """In three parts: with a short one in the middle at every place, and with `every` other longer one."""
    places = itertools.combinations_with_replacement(range(len(output) + 1), 2)
    for number, (first, second) in enumerate(places):
        if second - first <= SHORT_PART or number % every == 0:
            assert read(make, output[:first], output[first:second], output[second:]) == expected


@pytest.mark.parametrize(("make", "output", "expected"), CASES)
def test_every_cut_gives_the_same(make: Callable[[], CallParser], output: str, expected: Read) -> None:
    """Whole, sign by sign, in two parts at any place, and in three at many places."""
    assert read(make, output) == expected
    assert read(make, *output) == expected
    check_cuts(make, output, expected, 11)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "output", "expected"), CASES)
def test_every_two_cuts_give_the_same(make: Callable[[], CallParser], output: str, expected: Read) -> None:
    """At any two places."""
    check_cuts(make, output, expected, 1)


@pytest.mark.parametrize(("make", "output", "expected"), CASES)
def test_arguments_of_whole_calls_are_json(
    make: Callable[[], CallParser], output: str, expected: Read
) -> None:
    """As the model wrote them; only a call that the output's end cuts off has others."""
    for name, arguments in expected[1]:
        assert name
        if not output.endswith(('"b', "</para")):
            json.loads(arguments)


def test_arguments_come_as_they_are_written() -> None:
    """A caller sees the name when it is certain, and each sign of the arguments at once."""
    parser = hermes()
    assert parser.push('<tool_call>{"name": "f", "argumen') == []
    assert parser.push('ts": {"a') == [CallBegun(0, "f"), CallArguments(0, '{"a')]
    assert parser.push('": 1') == [CallArguments(0, '": 1')]
    assert parser.push("}}</tool_call>") == [CallArguments(0, "}")]


def test_arguments_between_tags_come_one_by_one() -> None:
    """A caller sees each when it is certain that its value is whole: another tag follows."""
    parser = tagged()
    assert parser.push("<tool_call>\n<function=f") == []
    assert parser.push(">\n<parameter=s>\na") == [CallBegun(0, "f")]
    assert parser.push("b\n</parameter>\n<par") == []
    assert parser.push("ameter=n>\n1\n</parameter>") == [CallArguments(0, '{"s": "ab"')]
    assert parser.push("\n</function>") == [CallArguments(0, ', "n": 1}')]


def test_a_name_has_a_bound() -> None:
    """A text that never ends it is no call."""
    output = f"<tool_call><function={'f' * 600}"
    assert read(tagged, *output) == (output, [])


def test_a_name_that_is_nested_too_deeply_is_none() -> None:
    """What the model wrote is text then, and not the end of the request."""
    depth = 100_000
    output = f'{{"name": {"[" * depth}{"]" * depth}, "arguments": {{}}}}'
    assert read(llama3, output) == (output, [])
    assert read(hermes, f"<tool_call>{output}") == (f"<tool_call>{output}", [])


def test_types_of_a_circle_with_many_branches() -> None:
    """It is read once."""
    circle = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]}
    schema = {"$defs": {"a": circle, "b": dict(circle)}, "properties": {"n": {"anyOf": [circle] * 50}}}
    assert ArgumentTypes([Tool("f", "", json.dumps(schema))])("f", "n") == {"null"}


@pytest.mark.parametrize("schema", ["", "[]", "5", '{"properties": 5}', '{"properties": {"n": 5}}'])
def test_a_schema_that_says_nothing_makes_strings(schema: str) -> None:
    """Whatever callers send as one."""
    types = ArgumentTypes([Tool("f", "", schema)])
    parsed = HermesParser(lambda: CallTags(types)).push(tags("f", ("n", "1")))
    assert put_together(parsed)[1] == [("f", '{"n": "1"}')]


def test_ordinary_text_is_not_held_back() -> None:
    """But for spaces, and for what may be a tag."""
    for make in (hermes, llama3):
        assert make().push("Hello") == [Text("Hello")]
    parser = hermes()
    assert parser.push("a <") == [Text("a")]
    assert parser.push("b") == [Text(" <b")]


class Counted(str):
    """A text that counts the characters that are copied when it, or a character of it, joins another text."""

    copied = 0

    def __iter__(self) -> Iterator[str]:
        return map(Counted, super().__iter__())

    def __add__(self, other: str) -> str:
        Counted.copied += len(self) + len(other)
        return super().__add__(other)

    def __radd__(self, other: str) -> str:
        Counted.copied += len(self) + len(other)
        return str.__add__(other, str(self))


MANY = 2000
LONG = "x" * MANY
HELD = [
    (hermes, " " * MANY + "."),
    (hermes, f"<tool_call>{ADD}{' ' * MANY}."),
    (hermes, "<tool_call>" + " " * MANY + "."),
    (hermes, f'<tool_call>{{"arguments": "{LONG}", "name": "f"}}'),
    (hermes, f'<tool_call>{{"name": "{LONG}"'),
    (hermes, f'<tool_call>{{"{LONG}"'),
    (hermes, "<tool_call>{" * (MANY // 10)),
    (hermes, " <tool_call" * (MANY // 10)),
    (llama3, " " * MANY + "."),
    (llama3, "<|python_tag|> " * (MANY // 10) + "."),
    (llama3, f"{CALL}{'; ' * MANY}."),
    (llama3, f'{{"name": "Bob", "x": "{LONG}"}}'),
    (llama3, f'{{"parameters": "{LONG}"}}'),
]


@pytest.mark.parametrize(("make", "output"), HELD)
def test_the_work_grows_with_the_text_and_not_with_its_square(
    make: Callable[[], CallParser], output: str
) -> None:
    """However much is held back: a character is copied a few times, not with each that follows."""
    Counted.copied = 0
    read(make, *(Counted(output[i : i + 3]) for i in range(0, len(output), 3)))
    assert Counted.copied < 20 * len(output)
