"""What docs/structured.md shows works, and so do the fields of the gateway, through the `openai` package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from outrider.client import Client
from tests.integration.cluster import ROOT, Cluster, Process

PAGE = (ROOT / "docs/structured.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(up: Process) -> Iterator[openai.OpenAI]:
    """The `openai` package."""
    with openai.OpenAI(base_url=up.ready["http"] + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_examples_of_the_page_run(up: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are, but for the addresses."""
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        there = block.replace("127.0.0.1:7700", up.endpoint).replace(
            "http://127.0.0.1:8000", up.ready["http"]
        )
        exec(compile(there, "docs/structured.md", "exec"), {"__name__": "page"})
    bicycle, red, number, parsed, word = capsys.readouterr().out.strip().rsplit("\n", 4)
    assert json.loads(bicycle)["colour"] in ("red", "green")
    assert red in ("yes", "no")
    assert re.fullmatch(r"\d{3}-\d{4}", number)
    assert re.fullmatch(r"gears=\d+ electric=(True|False)", parsed)
    assert re.fullmatch("[a-z]{5}", word)


class Step(BaseModel):
    """A part of the answer."""

    kind: Literal["add", "multiply"]
    factor: int = Field(ge=0, le=99)


class Plan(BaseModel):
    """An answer."""

    steps: list[Step] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=5)


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    """The package makes the schema, and an object of what comes back; streamed as well."""
    asked: Any = {"model": "target", "messages": HELLO, "response_format": Plan, "max_tokens": 300, "seed": 3}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Plan)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_json": {"enum": [1, 22]}}, "1|22"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_regex": "a{2}b?"}, "aab?"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: ("a" | "b") "c"'}, "[ab]c"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"json": {"const": "c"}}}, '"c"'),
    ],
    ids=str,
)
def test_every_field_holds_the_text(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    """OpenAI's and vLLM's, in completions and in conversations."""
    whole: Any = client.completions.create(model="target", prompt="x = ", max_tokens=60, extra_body=fields)
    chat: Any = client.chat.completions.create(
        model="target", messages=HELLO, max_tokens=60, extra_body=fields
    )
    assert whole.choices[0].finish_reason == chat.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, whole.choices[0].text, re.S)
    assert re.fullmatch(pattern, chat.choices[0].message.content, re.S)


def test_any_object(client: openai.OpenAI) -> None:
    """Valid where it comes to its end."""
    asked: Any = {"model": "target", "messages": HELLO, "max_tokens": 80, "temperature": 0}
    (found,) = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices
    assert found.message.content.startswith("{")
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)


def test_what_is_wrong_is_said_of_the_field_that_was_sent(client: openai.OpenAI) -> None:
    """Not of the one that it becomes; also in a stream, before it begins."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as failure:
            client.chat.completions.create(
                model="target", messages=HELLO, response_format=schema, stream=stream
            )
        assert failure.value.param == "response_format.json_schema.schema"
        assert "at #" in failure.value.message


def test_the_command_line_holds_the_text(up: Process, tmp_path: Path) -> None:
    """With a schema from a file; the flags are those of the page."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["red", "green"]}')
    grammar.write_text('start: "a" | "b"')
    cluster = Cluster(tmp_path)
    for flags, pattern in (
        (("--json-schema", str(schema)), '"red"|"green"'),
        (("--grammar", str(grammar)), "a|b"),
        (("--choice", "x", "--choice", "y"), "x|y"),
        (("--regex", "[0-9]{3}"), "[0-9]{3}"),
    ):
        process = cluster.launch("generate", "x = ", "--endpoint", up.endpoint, "--json", *flags)
        text = process.next_event()["text"]
        assert re.fullmatch(pattern, text)
    cluster.stop()


def test_the_library_takes_schemas_as_text_or_as_objects(up: Process) -> None:
    """Both say the same."""
    with Client(up.endpoint, timeout=60) as found:
        texts = {
            found.generate("x", json_schema=schema).text for schema in ({"const": "k"}, '{"const": "k"}')
        }
    assert texts == {'"k"'}
