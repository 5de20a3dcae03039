"""JSON schemas of many kinds, bounded so that also a random model comes to an end."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def obj(required: bool = True, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    """An array."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def matching(pattern: str) -> dict[str, Any]:
    """A string with a pattern."""
    return {"type": "string", "pattern": pattern}


def formatted(name: str) -> dict[str, Any]:
    """A string with a format."""
    return {"type": "string", "format": name}


def _defined(root: Any, **definitions: Any) -> dict[str, Any]:
    return {**root, "$defs": definitions}


_TREE = _defined(
    {"$ref": "#/$defs/one"},
    one=obj(v=DIGIT, below=array({"$ref": "#/$defs/two"}, 2)),
    two=obj(v=DIGIT, below=array({"$ref": "#/$defs/three"}, 2)),
    three=obj(v=DIGIT),
)
_RECURSIVE = _defined(
    {"$ref": "#/$defs/node"}, node=obj(v=DIGIT, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
)

SCHEMAS: dict[str, Any] = {
    "true or false": {"type": "boolean"},
    "null": {"type": "null"},
    "digit": DIGIT,
    "integer in a range": {"type": "integer", "minimum": -120, "maximum": 4567},
    "integer above": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 98},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1},
    "negative number": {"type": "number", "exclusiveMaximum": 0, "minimum": -3.5},
    "tenths": {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 2},
    "short string": WORD,
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 3},
    "empty string": {"type": "string", "maxLength": 0},
    "letters": matching("^[a-z]{2,5}$"),
    "telephone": matching(r"^\d{3}-\d{4}$"),
    "words with spaces": matching("^(red|green|blue)( (car|bus)){1,2}$"),
    "pattern inside": matching("^x[0-9]{1,3}[a-f]?$"),
    "date": formatted("date"),
    "time": formatted("time"),
    "date and time": formatted("date-time"),
    "uuid": formatted("uuid"),
    "ipv4": formatted("ipv4"),
    "colour": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": ["one", 2, None, True, 4.5]},
    "enum of objects": {"enum": [{"a": 1}, {"b": [2, 3]}]},
    "const text": {"const": "a text that is known to its end"},
    "const object": {"const": {"nested": {"list": [1, "two", None]}}},
    "unicode const": {"const": "größer als 日本"},
    "escapes": {"enum": ['a "quote"', "a\\backslash", "a\nline"]},
    "array of digits": array(DIGIT),
    "array of enums": array({"enum": ["yes", "no"]}, 4, 2),
    "empty array": array(DIGIT, 0),
    "array of arrays": array(array({"type": "boolean"}, 2), 2, 1),
    "tuple": {"type": "array", "prefixItems": [DIGIT, {"enum": ["a", "b"]}], "items": False, "minItems": 2},
    "tuple and rest": {
        "type": "array",
        "prefixItems": [{"const": "head"}],
        "items": DIGIT,
        "minItems": 1,
        "maxItems": 4,
    },
    "array of objects": array(obj(id=DIGIT, on={"type": "boolean"}), 2, 1),
    "flat object": obj(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional properties": obj(False, a=DIGIT, b={"type": "boolean"}, c={"enum": ["x", "y"]}),
    "some required": {**obj(False, a=DIGIT, b=DIGIT, c=DIGIT), "required": ["b"]},
    "empty object": obj(),
    "nested object": obj(outer=obj(inner=obj(value=DIGIT))),
    "wide object": obj(**{f"field_{index}": DIGIT for index in range(12)}),
    "long names": obj(**{f"a_property_with_a_rather_long_name_{name}": DIGIT for name in "abc"}),
    "names that need escapes": obj(**{'a "b"': DIGIT, "c\\d": DIGIT, "ä ö": DIGIT}),
    "map of digits": {
        "type": "object",
        "patternProperties": {"^[a-c]$": DIGIT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "open object": {
        "type": "object",
        "properties": {"kind": {"const": "k"}},
        "required": ["kind"],
        "additionalProperties": DIGIT,
        "maxProperties": 2,
    },
    "address": obj(street=WORD, number=DIGIT, zip=matching("^[0-9]{5}$"), country={"enum": ["DE", "FR"]}),
    "person": obj(name=obj(first=WORD, last=WORD), emails=array(matching("^[a-z]{1,3}@[a-z]{1,3}[.]de$"), 2)),
    "union of types": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "union of a string and a list": {"anyOf": [WORD, array(WORD, 2)]},
    "union of objects": {
        "anyOf": [obj(kind={"const": "circle"}, r=DIGIT), obj(kind={"const": "square"}, side=DIGIT)]
    },
    "one of": {"oneOf": [obj(kind={"const": "a"}, v=DIGIT), obj(kind={"const": "b"}, w={"type": "boolean"})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 17}]},
    "all of objects": {**obj(a=True, b=DIGIT), "allOf": [{"properties": {"a": DIGIT}}]},
    "nullable object": {"anyOf": [{"type": "null"}, obj(a=DIGIT)]},
    "reference": _defined(obj(a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"}), d=DIGIT),
    "references in a chain": _defined({"$ref": "#/$defs/a"}, a={"$ref": "#/$defs/b"}, b=obj(v=DIGIT)),
    "tree": _TREE,
    "recursion": _RECURSIVE,
    "tool call": obj(
        name={"enum": ["search", "open"]},
        arguments=obj(query=WORD, limit={"type": "integer", "maximum": 10, "minimum": 1}),
    ),
    "event": obj(title=WORD, day=formatted("date"), attendees=array(WORD, 2), private={"type": "boolean"}),
    "matrix": array(array(DIGIT, 2, 2), 2, 2),
    "steps and answer": obj(steps=array(obj(why=WORD, result=WORD), 2, 1), answer=WORD),
    "product": obj(
        id=matching("^P-[0-9]{4}$"),
        price={"type": "number", "minimum": 0, "maximum": 99},
        tags=array(WORD, 2),
    ),
    "boolean schema below": obj(flag={"type": "boolean"}, note={"anyOf": [WORD, {"type": "null"}]}),
    "compact": {**obj(a=DIGIT, b=array(DIGIT, 2)), "x-guidance": {"whitespace_flexible": False}},
}
QUICK = (
    *("flat object", "array of objects", "union of objects", "recursion", "words with spaces", "mixed enum"),
    *("number in a range", "const object", "optional properties", "names that need escapes"),
)
"""Those that every run tries; the others are slow."""
