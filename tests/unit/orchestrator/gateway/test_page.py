"""The page's files, and the events that it reads, before a fake orchestrator."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from typing import Any

import grpc
import pytest

from outrider.protocol.errors import ContextTooLong
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted, rig

STREAM = "/outrider/stream"
PROMPT = {"prompt": "count", "max_tokens": 3, "seed": 5}
STATIC = files("orchestrator.gateway.page").joinpath("static")
TOKEN_COLOURS = ("ink", "draft", "lookup", "grammar", "soft", "error")
MIN_CONTRAST = 4.5
"""Of text and its background, as WCAG's level AA has it."""


def _get(fake: FakeOrchestrator, *paths: str, **options: Any) -> list[Response]:
    async def run() -> list[Response]:
        async with rig(fake.endpoint, **options) as made:
            return [await made.http.get(path) for path in paths]

    return asyncio.run(run())


def _post(
    fake: FakeOrchestrator, body: Any, headers: dict[str, str] | None = None, **options: Any
) -> Response:
    return posted(fake.endpoint, STREAM, body, headers, **options)


def test_the_page_and_all_that_it_loads_are_served(fake: FakeOrchestrator) -> None:
    """Each with its media type, and a policy that lets nothing else in."""
    (page,) = _get(fake, "/")
    text = page.parts[0].decode()
    loaded = re.findall(r'(?:href|src)="([^"]+)"', text)
    modules = re.findall(r'from "\./([^"]+)"', "".join(_source(name) for name in _names(".js")))
    paths = {f"/{path}" for path in loaded} | {f"/outrider/page/{name}" for name in modules}
    assert paths == {f"/outrider/page/{name}" for name in _names("") if name != "index.html"}
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path, answer in zip(paths, _get(fake, *paths), strict=True):
        kind = next(kind for suffix, kind in kinds.items() if path.endswith(suffix))
        assert (answer.status, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_holds_no_code_and_calls_nobody_else() -> None:
    """No script or style within it, no handler, and no address of another host."""
    page = _source("index.html")
    assert not re.search(r"<style|style=|\son\w+=|<script(?! type=\"module\" src=)", page)
    for name in _names(""):
        addresses = set(re.findall(r"https?://[\w./]+", _source(name)))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_a_setting_switches_the_page_off(fake: FakeOrchestrator) -> None:
    """Its events as well."""
    assert [answer.status for answer in _get(fake, "/", "/outrider/page/main.js", page=False)] == [404, 404]
    answer = _post(fake, PROMPT, page=False)
    assert answer.status == 404
    assert answer.error["message"].endswith("/tokenize, /detokenize")


def test_files_need_no_token_and_events_do(fake: FakeOrchestrator) -> None:
    """The page has a field for it."""
    tokens = b"s3cret\n"
    assert [answer.status for answer in _get(fake, "/", "/outrider/page/main.js", tokens=tokens)] == [
        200,
        200,
    ]
    assert _post(fake, PROMPT, tokens=tokens).status == 401
    assert _post(fake, PROMPT, {"authorization": "Bearer s3cret"}, tokens=tokens).status == 200
    assert fake.metadata[0]["authorization"] == "Bearer s3cret"


def test_events_tell_tokens_and_steps(fake: FakeOrchestrator) -> None:
    """A seed and times are such that a browser does not round them."""
    answer = _post(fake, {**PROMPT, "seed": 2**64 - 1}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    started, *chunks, complete, done = answer.events
    assert (started["type"], started["seed"], started["model"]) == ("started", str(2**64 - 1), "demo")
    assert "".join(chunk["text"] for chunk in chunks) == "one two three"
    assert [chunk["origins"] for chunk in chunks] == [["draft"]] * 3
    step = chunks[0]["step"]
    assert step["nodes"] == [
        {"id": 11, "text": "one ", "parent": None, "origin": "draft", "accepted": True},
        {"id": 7, "text": None, "parent": 0, "origin": "lookup", "accepted": False},
    ]
    assert (step["number"], step["bonus"]) == (1, {"id": 99, "text": "\ufffd"})
    (bar,) = step["timeline"]
    assert (bar["lane"], bar["start_us"], bar["duration_us"]) == ("verify", 10**15, 500)
    assert (complete["finish_reason"], complete["usage"]["completion_tokens"], done) == ("stop", 3, "[DONE]")
    assert fake.requests[0].record_steps
    assert fake.metadata[0]["traceparent"].startswith(f"00-{'a' * 32}-")


def test_a_conversation_has_steps_too(fake: FakeOrchestrator) -> None:
    """Messages instead of a prompt."""
    answer = _post(fake, {"messages": [{"role": "user", "content": "hello"}]})
    assert answer.events[1]["step"]["number"] == 1
    assert fake.requests[0].chat.messages[0].content == "hello"


async def test_other_requests_do_not_ask_for_steps(fake: FakeOrchestrator) -> None:
    """Nothing is told that was not asked for."""
    async with rig(fake.endpoint) as made:
        await made.http.post("/v1/completions", {**PROMPT, "stream": True})
    assert not fake.requests[0].record_steps


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_shown_is_refused(fake: FakeOrchestrator, body: Any, parameter: str) -> None:
    """Before anything is asked of the orchestrator."""
    answer = _post(fake, body)
    assert (answer.status, answer.error["param"], fake.requests) == (400, parameter, [])


def test_errors_are_the_apis_own(fake: FakeOrchestrator) -> None:
    """With a status before the stream has begun, and as its last event within it."""
    fake.error = ContextTooLong("sampling.max_tokens", "999 exceed the context")
    assert _post(fake, PROMPT).error["param"] == "max_tokens"
    fake.error = None
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 9]
    answer = _post(fake, PROMPT)
    assert (answer.status, answer.events[-1]["error"]["code"]) == (200, "unavailable")


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_can_be_read_in_both_schemes(scheme: int) -> None:
    """Every colour of text against cards, the page and marked tokens."""
    blocks = re.findall(r":root \{(.*?)\}", _source("style.css"), re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme]))
    for name in TOKEN_COLOURS:
        for background in ("card", "paper", *(["marked"] if name not in ("soft", "error") else [])):
            assert _contrast(colours[name], colours[background]) >= MIN_CONTRAST, (name, background)
    assert _contrast(colours["accent"], colours["on-accent"]) >= MIN_CONTRAST


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _names(suffix: str) -> list[str]:
    return [entry.name for entry in STATIC.iterdir() if entry.name.endswith(suffix)]


def _source(name: str) -> str:
    return STATIC.joinpath(name).read_text(encoding="utf-8")
