"""Constraints of every kind compile, and what is wrong with one is said with its place."""

from __future__ import annotations

import json

import pytest

from outrider.grammar.compiling import compiled
from outrider.grammar.vocabulary import bytes_alone, load_vocabulary
from outrider.protocol.constraint import MAX_BYTES, MAX_CHOICES, Constraint, ConstraintKind
from outrider.protocol.errors import InvalidRequest
from tests.grammars import TOKENIZER, choice, grammar, ids, json_schema, matcher, regex, vocabulary

DEEP = {"properties": {"x": {"items": {"anyOf": [{"type": "string"}, {"not": {"type": "string"}}]}}}}
DEFINED = {
    "properties": {"a/b": {"$ref": "#/$defs/q"}},
    "$defs": {"q": {"properties": {"z": {"type": "string", "format": "x"}}}},
}
WRONG = [
    (json_schema({"type": "objec"}), "at #: Invalid type: objec"),
    (json_schema(DEEP), 'at #/properties/x/items/anyOf/1: Unimplemented keys: ["not"]'),
    (json_schema(DEFINED), "at #/$defs/q/properties/z: Unknown format: x"),
    (json_schema({"properties": {"a/b": {"$ref": "#/no"}}}), "at #/properties/a~1b: Pointer '/no'"),
    (json_schema({"prefixItems": [{}, {"enum": 3}]}), "at #/prefixItems/1: enum must be an array"),
    (json_schema([]), "must be a JSON object"),
    (Constraint(ConstraintKind.JSON_SCHEMA, ('{"a": ',)), "is no JSON: Expecting value: line 1 column 7"),
    (Constraint(ConstraintKind.JSON_SCHEMA, ('{"a":' * 200 + "1" + "}" * 200,)), "line 1 column"),
    (Constraint(ConstraintKind.JSON_SCHEMA, ("[" * 50_000,)), "is nested too deeply"),
    (Constraint(ConstraintKind.JSON_SCHEMA, ("9" * 5_000,)), "is no JSON: a number has too many digits"),
    (regex("a(b"), "at character 2: unclosed group"),
    (regex("x[z-a]"), "at character 3: invalid character class range"),
    (regex("a\\"), "at character 2: nothing follows the backslash"),
    (regex("(?=a)b"), "look-around"),
    (grammar('start: bar\nbar: "x" foo'), 'at line 2, column 6: unknown name: "foo"'),
    (grammar("start: /a(/"), "at line 1, column 8: invalid regex"),
    (grammar('other: "x"'), "no start rule"),
    (grammar(' {"type": "object"}'), "must be Lark or GBNF, not JSON; a schema goes in json_schema"),
    (grammar("root ::= foo"), "'foo' not found"),
]


@pytest.mark.parametrize(("constraint", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_with_its_place(constraint: Constraint, said: str) -> None:
    """A JSON pointer, a character, or a line and a column, under the name of the request's field."""
    with pytest.raises(InvalidRequest) as failure:
        compiled(constraint, vocabulary())
    assert failure.value.field == constraint.field
    assert said in failure.value.problem
    assert "\n" not in failure.value.problem


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (json_schema({"type": "array", "items": {"const": None}}), "[null, null]"),
        (Constraint(ConstraintKind.JSON_OBJECT), '{"any": ["thing", 1.5e3]}'),
        (regex(r"^\d{3}-[a-c]+$"), "123-abc"),
        (regex("[äöü]+"), "äöü"),
        (choice("yes", 'a "quoted"\n\\line'), 'a "quoted"\n\\line'),
        (grammar('start: greeting " " /[A-Z][a-z]*/\ngreeting: "hello" | "bye"'), "bye Ada"),
        (grammar('root ::= "a" root "b" | ""'), "aabb"),
        (grammar('start: "x=" value\nvalue: %json {"type": "integer"}'), "x=12"),
    ],
    ids=str,
)
def test_every_kind_takes_its_texts(constraint: Constraint, text: str) -> None:
    """With the tokens that the tokenizer makes of them; with single bytes as well."""
    found = matcher(constraint, ids(text))
    assert found.complete or found.mask(())[0] & 1, "the text may end here"
    assert matcher(constraint, list(text.encode()), bytes_alone()).problem == ""


@pytest.mark.parametrize("indent", [None, 2, 8])
def test_json_may_be_laid_out_as_people_do(indent: int | None) -> None:
    """On one line or indented; runs of white space, with which a model may go on for ever, are refused."""
    value = {"b": [1, {"c": [True]}], "a": {}}
    matcher(Constraint(ConstraintKind.JSON_OBJECT), ids(json.dumps(value, indent=indent)))
    run = matcher(Constraint(ConstraintKind.JSON_OBJECT), ids("{\n"))
    assert not run.advance(ids("\n")[0])
    assert run.problem


def test_properties_keep_their_order() -> None:
    """As the schema has them, which a dictionary sorted by name would not."""
    both = {"zz": {"type": "integer"}, "aa": {"type": "integer"}}
    constraint = json_schema({"type": "object", "properties": both, "required": ["zz", "aa"]})
    assert matcher(constraint, ids('{"zz": 1, "aa": 2}')).complete


@pytest.mark.parametrize(
    ("kind", "texts", "said"),
    [
        (ConstraintKind.REGEX, ("a" * (MAX_BYTES + 1),), "at most 131072 bytes"),
        (ConstraintKind.CHOICE, ("ä" * (MAX_BYTES // 2), "b"), "at most 131072 bytes"),
        (ConstraintKind.CHOICE, ("a",) * (MAX_CHOICES + 1), "at most 1024 texts"),
        (ConstraintKind.CHOICE, ("a", ""), "must not be empty"),
        (ConstraintKind.CHOICE, (), "must not be empty"),
        (ConstraintKind.GRAMMAR, ("",), "must not be empty"),
    ],
)
def test_constraints_are_bounded_before_they_are_read(
    kind: ConstraintKind, texts: tuple[str, ...], said: str
) -> None:
    """In bytes and in number, under the name of the field."""
    with pytest.raises(InvalidRequest, match=said) as failure:
        Constraint(kind, texts)
    assert failure.value.field == f"sampling.{kind}"


def test_digests_tell_constraints_apart() -> None:
    """By kind and by where texts end; equal ones have the same."""
    all_of_them = [choice("ab", "c"), choice("a", "bc"), choice("abc"), regex("abc"), grammar("abc")]
    assert len({constraint.digest for constraint in all_of_them}) == len(all_of_them)
    assert choice("a", "b").digest == choice("a", "b").digest


def test_a_tokenizer_that_cannot_be_used_is_none() -> None:
    """Nothing to load, no end token, or one of a kind that is not understood: constraints are refused."""
    assert load_vocabulary(None, [0]) is None
    assert load_vocabulary(TOKENIZER.read_bytes(), []) is None
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    wordwise = {"version": "1.0", "added_tokens": [], "model": model}
    assert load_vocabulary(json.dumps(wordwise).encode(), [0]) is None
    assert load_vocabulary(TOKENIZER.read_bytes(), [0]) is not None
