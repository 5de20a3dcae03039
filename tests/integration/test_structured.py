"""Structured output is the target's own, whatever the drafts do, and always valid: real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import torch
from llguidance import LLTokenizer

from outrider.grammar.vocabulary import vocabulary_of
from outrider.v1 import tokens_pb2
from tests.grammars import json_schema, matcher, tokens_of
from tests.integration.client import (
    AUTO,
    OFF,
    SEQUENTIAL,
    Client,
    Generation,
    collect,
    details,
    eventually,
    request,
)
from tests.integration.cluster import DEMO_TARGET, Cluster
from tests.integration.reference import Reference, assert_same
from tests.integration.schemas import QUICK, SCHEMAS
from tests.models import EOS_ID, build_model

STOP = 1
PROMPT = "# a record, as JSON\nrecord = "
SAMPLERS = {"greedy": {}, "T=1": {"temperature": 1.0, "seed": 3}}


@dataclass
class Served:
    """A pair behind an orchestrator, and the target by itself."""

    client: Client
    folder: Path
    ends: list[int]
    prompt: str

    @cached_property
    def reference(self) -> Reference:
        """Plain `transformers`."""
        return Reference(self.folder)

    @cached_property
    def words(self) -> LLTokenizer:
        """The vocabulary."""
        return vocabulary_of((self.folder / "tokenizer.json").read_bytes(), self.ends)

    def masked(self, schema: Any, prompt: Sequence[int], most: int) -> list[int]:
        """Greedy tokens from plain logits, each under the mask of a new matcher."""
        tokens: list[int] = []
        while len(tokens) < most:
            state = matcher(json_schema(schema), tokens, self.words)
            if state.complete or tokens[-1:] == self.ends:
                break
            logits = self.reference.logits([*prompt, *tokens])[-1]
            allowed = torch.full_like(logits, -torch.inf)
            allowed[tokens_of(state.mask(()))] = 0.0
            tokens.append(int((logits + allowed).argmax()))
        return tokens

    def generate(self, schema: Any, **options: Any) -> Generation:
        """One text under a schema."""
        given = {"max_tokens": 150, "ignore_eos": False, "json_schema": json.dumps(schema)} | options
        return self.client.generate(self.prompt, **given)


@pytest.fixture(scope="module", params=["demo", "random"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo pair, and a random target with a random draft of its vocabulary."""
    if request.param == "demo":
        demo = request.getfixturevalue("demo")
        yield Served(demo.client("real"), DEMO_TARGET, [0], PROMPT)
        return
    folders = [
        build_model("llama", tmp_path_factory.mktemp("random"), seed=seed, vocab_size=300) for seed in (1, 2)
    ]
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    target = cluster.serve("verify", model=folders[0], dtype="float32", kv_tokens=16384)
    draft = cluster.serve("draft", model=folders[1], dtype="float32", kv_tokens=16384)
    endpoints = {"verify": target.wait_ready().endpoint, "draft": draft.wait_ready().endpoint}
    client = Client(cluster.serve("orchestrator", **endpoints).wait_ready().endpoint)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
    yield Served(client, folders[0], [EOS_ID], "The quick brown fox ")
    cluster.stop()


def check(served: Served, name: str) -> list[Generation]:
    """One schema in every mode, greedy and sampled: the same tokens, and valid where they ended."""
    found = []
    for sampler in SAMPLERS.values():
        alone = served.generate(SCHEMAS[name], mode=OFF, **sampler)
        for mode in (SEQUENTIAL, AUTO):
            other = served.generate(SCHEMAS[name], mode=mode, **sampler)
            assert other.tokens == alone.tokens, f"{name}: {alone.text!r} became {other.text!r}"
            assert other.complete.finish_reason == alone.complete.finish_reason
            found.append(other)
        if alone.complete.finish_reason == STOP:
            jsonschema.validate(json.loads(alone.text), SCHEMAS[name])
    return found


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(tuple(set(SCHEMAS) - set(QUICK)), marks=pytest.mark.slow)],
    ids=["quick", "rest"],
)
def test_all_modes_give_the_same_valid_json(served: Served, names: Sequence[str]) -> None:
    """Over schemas of many kinds; most texts come to their end, and drafts have a part in them."""
    with ThreadPoolExecutor(4) as pool:
        found = [
            each for every in pool.map(lambda name: check(served, name), sorted(names)) for each in every
        ]
    ended = sum(each.complete.finish_reason == STOP for each in found)
    assert ended > 0.6 * len(found)
    assert sum(each.statistics.accepted for each in found) > len(found)


def test_there_are_sixty_schemas() -> None:
    """The sweep is as wide as it says."""
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", ["flat object", "union of objects", "mixed enum"])
def test_greedy_tokens_are_those_of_plain_logits_under_the_mask(served: Served, name: str) -> None:
    """An implementation of its own: `transformers` and a new matcher for every token."""
    prompt = served.words.tokenize_str(served.prompt)
    expected = served.masked(SCHEMAS[name], prompt, 40)
    options = {"max_tokens": 40, "ignore_eos": False, "json_schema": json.dumps(SCHEMAS[name])}
    for mode in (OFF, AUTO):
        found = served.client.generate(prompt, mode=mode, **options)
        assert_same(served.reference, prompt, expected, found.tokens)


def test_other_kinds_of_constraints(served: Served) -> None:
    """Expressions, choices, grammars and any object: equal in all modes."""
    kinds: list[dict[str, Any]] = [
        {"regex": r"[A-Z]{2}-\d{4}"},
        {"choice": tokens_pb2.Choice(texts=["accept", "accept later", "refuse"])},
        {"grammar": 'start: "(" start ")" | "x"'},
        {"json_object": True},
    ]
    for kind in kinds:
        texts = {
            served.client.generate(
                served.prompt, mode=mode, max_tokens=40, temperature=1.0, ignore_eos=False, **kind
            ).text
            for mode in (OFF, SEQUENTIAL, AUTO)
        }
        assert len(texts) == 1
    found = served.client.generate(served.prompt, **kinds[1], ignore_eos=True, min_tokens=20, max_tokens=30)
    assert found.text in ("accept", "accept later", "refuse"), "a whole text ends whatever else is asked"
    assert found.complete.finish_reason == STOP


def test_constraints_go_with_the_other_parameters(served: Served) -> None:
    """Continuations, stop strings, biases, log probabilities, and a stream that is resumed at every token."""
    schema, sampling = SCHEMAS["array of objects"], {"temperature": 1.0, "seed": 9}
    together = collect(
        served.client.stream(
            request(
                served.prompt,
                n=3,
                max_tokens=60,
                ignore_eos=False,
                json_schema=json.dumps(schema),
                **sampling,
            )
        )
    )
    alone = [served.generate(schema, max_tokens=60, temperature=1.0, seed=9 + i) for i in range(3)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for count in range(1, len(alone[0].tokens) + 1, 4):
        given = {"fields": {"resume_token_ids": alone[0].tokens[:count]}, "max_tokens": 60, **sampling}
        assert served.generate(schema, **given).tokens == alone[0].tokens[count:]
    whole = {"fields": {"resume_token_ids": alone[0].tokens}, "max_tokens": 60, **sampling}
    if alone[0].complete.finish_reason == STOP:
        assert served.generate(schema, **whole).complete.finish_reason == STOP
    cut = served.generate(schema, stop=['"id"'], **sampling)
    assert cut.complete.stop == '"id"'
    penalised = [
        served.generate(schema, mode=mode, logprobs=2, frequency_penalty=1.0, logit_bias={7: 2.0}, **sampling)
        for mode in (OFF, AUTO)
    ]
    assert penalised[0].tokens == penalised[1].tokens
    assert len(penalised[0].logprobs) == len(penalised[0].tokens)


@pytest.mark.parametrize(
    ("constraint", "field", "said"),
    [
        ({"json_schema": '{"properties": {"a": {"not": {}}}}'}, "json_schema", "#/properties/a"),
        ({"json_schema": '{"a": '}, "json_schema", "line 1 column 7"),
        ({"regex": "a(b"}, "regex", "character 2"),
        ({"grammar": "start: foo"}, "grammar", "line 1, column 8"),
        ({"choice": tokens_pb2.Choice()}, "choice", "empty"),
        (
            {"json_schema": '{"type": "integer", "multipleOf": 10000019}'},
            "json_schema",
            "more time or memory",
        ),
        (
            {
                "grammar": "start: r0\n"
                + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(5000))
                + 'r5000: "x"'
            },
            *("grammar", "more time or memory"),
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_wrong_constraint_is_an_invalid_argument(
    served: Served, constraint: Any, field: str, said: str
) -> None:
    """With the field and the place, also where it would end the process; others are served meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.generate, SCHEMAS["colour"])
        with pytest.raises(grpc.RpcError) as failure:
            served.client.generate(served.prompt, **constraint)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details(failure.value)["BadRequest"].field_violations
        assert violation.field == f"sampling.{field}"
        assert said in violation.description
        assert json.loads(other.result().text) in ("red", "green", "blue")


def test_tokens_that_do_not_follow_are_not_resumed(served: Served) -> None:
    """The one that does not is named."""
    tokens = served.words.tokenize_str("maybe")
    with pytest.raises(grpc.RpcError, match=r"resume_token_ids\[0\]: does not follow sampling.json_schema"):
        served.generate(SCHEMAS["colour"], fields={"resume_token_ids": tokens})
