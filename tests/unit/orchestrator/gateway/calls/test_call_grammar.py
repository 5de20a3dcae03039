"""Texts that a caller who requires a call gets: every one is read as calls of the functions asked for."""

from __future__ import annotations

import json
import random

import pytest

from orchestrator.gateway.calls.argument_types import ArgumentTypes
from orchestrator.gateway.calls.call_grammar import or_answer
from orchestrator.gateway.calls.formats import FORMATS, CallFormat
from orchestrator.gateway.calls.pieces import CallArguments, CallBegun
from outrider.client import Tool
from outrider.protocol.constraint import MAX_BYTES
from tests.grammars import EOS, accepts, grammar, matcher, tokens_of, vocabulary

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
TOOLS = [
    Tool("add", "Adds a::=b.", json.dumps({"properties": {"a::=": {"const": "::="}}, "required": ["a::="]})),
    Tool("now", "", ""),
    Tool(
        'say "\\::=', "", json.dumps({"$defs": {"node": NODE}, "properties": {"n": {"$ref": "#/$defs/node"}}})
    ),
]
ADD = '{"a::=": "::="}'
MAX_TOKENS = 60


def _format(name: str) -> CallFormat:
    found = FORMATS[name]
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_random_texts_of_the_grammar_are_calls(name: str) -> None:
    """Names as they were offered, arguments that are JSON, however odd names and schemas are."""
    form = _format(name)
    source, noise, whole = form.grammar(TOOLS, True), random.Random(5), 0
    for _ in range(40):
        follows, tokens = matcher(grammar(source)), list[int]()
        while len(tokens) < MAX_TOKENS and follows.allows(()):
            tokens.append(noise.choice(tokens_of(follows.mask(()))))
            if tokens[-1] == EOS:
                break
            follows.advance(tokens[-1])
        text = vocabulary().decode_str([token for token in tokens if token != EOS])
        parser = form.parser(TOOLS)
        pieces = [*parser.push(text), *parser.finish()]
        names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
        assert set(names) <= {tool.name for tool in TOOLS}
        if tokens[-1] == EOS or not follows.allows(()):
            whole += 1
            assert names
            for index in range(len(names)):
                told = [one.text for one in pieces if isinstance(one, CallArguments) and one.index == index]
                assert isinstance(json.loads("".join(told)), dict)
            assert all(isinstance(piece, CallBegun | CallArguments) for piece in pieces)
    assert whole >= 5


def test_one_call_or_several() -> None:
    """In the format of the model; text beside calls is not allowed."""
    one = f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>'
    hermes = _format("hermes").grammar
    assert accepts(hermes(TOOLS, False), one)
    assert accepts(hermes(TOOLS, True), f"{one}\n{one}")
    assert not accepts(hermes(TOOLS, False), f"{one}\n{one}")
    assert not accepts(hermes(TOOLS, True), f"Well. {one}")
    assert not accepts(hermes(TOOLS[1:], True), one)
    assert not accepts(hermes(TOOLS, True), one.replace('"::="}', '"x"}'))
    bare = f'{{"name": "add", "parameters": {ADD}}}'
    assert accepts(_format("llama3").grammar(TOOLS, True), f"{bare}; {bare}")
    assert not accepts(_format("llama3").grammar(TOOLS, False), f"{bare}; {bare}")


ONE, TWO = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {"properties": {"s": {}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"$ref": "#/$defs/one", "$defs": {"one": ONE}}, ["n"], ["", "s", "n s"]),
        ({"allOf": [{"$ref": "#/$defs/one"}, TWO], "$defs": {"one": ONE}}, ["n", "n s"], ["", "s"]),
        ({"anyOf": [ONE, TWO]}, ["n", "s"], ["x"]),
    ],
)
def test_parameters_may_be_named_anywhere(schema, allowed, refused) -> None:
    """By a reference, as pydantic writes models that contain themselves, or in alternatives."""
    source = _format("qwen3_coder").grammar([Tool("f", "", json.dumps(schema))], False)
    for names, expected in ((allowed, True), (refused, False)):
        for each in names:
            parts = [f"<parameter={name}>\n5\n</parameter>\n" for name in each.split()]
            text = f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"
            assert accepts(source, text) is expected, each
    assert ArgumentTypes([Tool("f", "", json.dumps(schema))])("f", "n") == {"integer"}


def test_calls_with_tags() -> None:
    """Parameters in the order of the schema, those that are required always; a string is any text."""
    properties = {
        "n": {"type": "integer"},
        "d": {"enum": ["mon", "tue"]},
        "s": {"type": "string"},
        "node": {"$ref": "#/$defs/node"},
    }
    schema = {"$defs": {"node": NODE}, "properties": properties, "required": ["n"]}
    source = _format("qwen3_coder").grammar([Tool("f", "", json.dumps(schema))], False)

    def call(**values: str) -> str:
        parts = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()]
        return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"

    assert accepts(source, call(n="5"))
    assert accepts(source, call(n="5", d="tue", s='a "b"\n\n</c>', node='{"next": {}}'))
    assert accepts(source, call(n="5", s=""))
    assert not accepts(source, call(d="tue"))
    assert not accepts(source, call(n="x"))
    assert not accepts(source, call(n="5", d="sun"))
    assert not accepts(source, call(n="5", node='{"last": {}}'))
    assert not accepts(source, call(n="5", more="6"))
    assert not accepts(source, call(s="a", n="5"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": ["mon", "tue"], "type": "string"}, "mon tue"),
        ({"const": "mon", "type": "string"}, "mon"),
        ({"anyOf": [{"enum": ["mon", "tue"], "type": "string"}, {"type": "null"}]}, "mon tue null"),
        ({"oneOf": [{"const": "mon"}, {"$ref": "#/$defs/day"}]}, "mon tue"),
    ],
)
def test_a_few_texts_are_the_only_ones(schema, words) -> None:
    """As pydantic writes Literal and Optional; among other texts they are any text."""
    for one, others in ((schema, False), ({"anyOf": [schema, {"type": "string"}]}, True)):
        whole = {"properties": {"d": one}, "$defs": {"day": {"enum": ["tue"]}}}
        source = _format("qwen3_coder").grammar([Tool("f", "", json.dumps(whole))], False)
        for word, expected in [*((word, True) for word in words.split()), ("sun", others)]:
            part = f"<parameter=d>\n{word}\n</parameter>\n"
            text = f"<tool_call>\n<function=f>\n{part}</function>\n</tool_call>"
            assert accepts(source, text) is expected, word


def test_references_are_within_the_whole_schema() -> None:
    """To the arguments themselves, and to other parameters, as zod writes what is used twice."""
    properties = {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "from": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
        "path": {"type": "array", "items": {"$ref": "#/properties/from"}},
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    source = _format("qwen3_coder").grammar([Tool("f", "", json.dumps(schema))], False)

    def call(name: str, value: str) -> str:
        part = f"<parameter={name}>\n{value}\n</parameter>\n"
        return f"<tool_call>\n<function=f>\n{part}</function>\n</tool_call>"

    assert accepts(source, call("children", '[{"name": "y"}]'))
    assert not accepts(source, call("children", "[[[]]]"))
    assert accepts(source, call("path", '[{"x": 1}]'))
    assert not accepts(source, call("path", '[{"y": 1}]'))


@pytest.mark.parametrize(
    "schema", [{"required": 5}, {"properties": {}}, {"properties": 5}, {"required": ["a"]}]
)
def test_a_function_without_parameters(schema: dict[str, object]) -> None:
    """Also where its schema makes no sense."""
    source = _format("qwen3_coder").grammar([Tool("f", "", json.dumps(schema))], False)
    assert accepts(source, "<tool_call>\n<function=f>\n</function>\n</tool_call>")


def test_a_grammar_that_is_too_large_is_not_written_to_its_end() -> None:
    """Every parameter would repeat the schema that all refer to."""
    shared = {"enum": list(range(20_000))}
    properties = {f"p{number}": {"anyOf": [{"$ref": "#/$defs/a"}]} for number in range(1_000)}
    tool = Tool("f", "", json.dumps({"$defs": {"a": shared}, "properties": properties}))
    assert MAX_BYTES < len(_format("qwen3_coder").grammar([tool], False)) < 3 * MAX_BYTES


def test_an_answer_in_json_or_calls() -> None:
    """The text is JSON of the schema or calls, and nothing else."""
    schema = {"type": "object", "properties": {"a::=": {"type": "integer"}}, "required": ["a::="]}
    source = or_answer(_format("hermes").grammar(TOOLS, True), schema)
    assert accepts(source, f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>')
    assert accepts(source, '{"a::=": 3}')
    assert accepts(source, '{\n  "a::=": 3\n}')
    assert not accepts(source, '{"a::=": "x"}')
    assert not accepts(source, "3")


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_options_that_a_tool_has_for_the_grammar_library_hold(name: str) -> None:
    """Without `coerce_one_of` the library refuses alternatives that may both be true."""
    parts = [{"type": "object", "properties": {key: {"type": "integer"}}} for key in "ab"]
    schema = {"properties": {"p": {"oneOf": parts}}, "x-guidance": {"coerce_one_of": True}}
    source = _format(name).grammar([Tool("f", "", json.dumps(schema))], False)
    assert matcher(grammar(source)).allows(())


def test_options_that_the_schema_of_an_answer_has_hold() -> None:
    """Its own white space, also beside calls."""
    schema = {"enum": [[1, 2]], "x-guidance": {"whitespace_pattern": "-"}}
    source = or_answer(_format("hermes").grammar(TOOLS, True), schema)
    assert accepts(source, "[1,-2]")
    assert not accepts(source, "[1, 2]")
