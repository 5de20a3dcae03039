"""The page of `outrider up` on the demo pair: its events over HTTP, and the page itself in a Chromium."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from outrider.client import Chunk, Client
from tests.integration.browser import browser, chromium
from tests.integration.cluster import Process, demo_up
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving
from tests.unit.orchestrator.gateway.test_process import gateway

PROMPT = "class Stack:\n    def __init__(self):\n"
TOKENS = 48
LONG = "1500"
MILLISECONDS = 60_000
expect.set_options(timeout=MILLISECONDS)
NARROW = 400
SEEN = """token => {
  const [one, whole] = [token, token.closest(".text")].map((element) => element.getBoundingClientRect());
  return one.top >= whole.top && one.bottom <= whole.bottom;
}"""
needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="NO BROWSER: the page was not opened; install the Debian package chromium"
)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`outrider up` of this module: nobody has made its drafts rest."""
    with demo_up(tmp_path_factory.mktemp("up")) as process:
        yield process


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    """A Chromium."""
    with browser() as started:
        yield started


@pytest.fixture
def context(chrome: Browser) -> Iterator[BrowserContext]:
    """A fresh window of usual size, that takes nothing from tests before."""
    with chrome.new_context(viewport={"width": 1200, "height": 800}) as made:
        yield made


@pytest.fixture
def page(context: BrowserContext, up: Process) -> Iterator[Page]:
    """The page, opened; nothing may have gone wrong in it, and nothing may have come from elsewhere."""
    with_errors: list[str] = []
    elsewhere: list[str] = []
    made, own = context.new_page(), up.ready["http"]
    made.on("console", lambda said: with_errors.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: with_errors.append(str(error)))
    made.on("request", lambda asked: None if asked.url.startswith(own) else elsewhere.append(asked.url))
    made.goto(own)
    yield made
    refused = [said for said in with_errors if "the server responded with a status of 400" not in said]
    assert (refused, elsewhere) == ([], [])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_steps_tell_where_every_token_comes_from(up: Process, temperature: float) -> None:
    """Over gRPC: the tokens are those of a request that asked for nothing, in every mode, and the steps add
    up to them."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": temperature, "seed": 3}
    with Client(up.endpoint) as client:
        plain = client.generate(PROMPT, **options)
        for mode in ("auto", "sequential", "off"):
            events = list(client.stream(PROMPT, mode=mode, record_steps=True, **options))
            chunks = [event for event in events if isinstance(event, Chunk)]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain.token_ids
            assert "".join(chunk.text for chunk in chunks) == plain.text
            _check_steps(chunks, events[-1].speculation, mode)


def _check_steps(chunks: list[Chunk], counts: Any, mode: str) -> None:
    steps = [chunk.step for chunk in chunks if chunk.step is not None]
    origins = [origin for chunk in chunks for origin in chunk.origins]
    nodes = [node for step in steps for node in step.nodes]
    assert [step.number for step in steps] == list(range(1, int(counts["steps"]) + 1))
    assert (len(nodes), sum(node.accepted for node in nodes)) == (counts["verified"], counts["accepted"])
    own = sum(step.bonus is not None for step in steps)
    assert (len(origins), origins.count("target")) == (TOKENS, own)
    assert {"draft", "lookup", "target"} >= set(origins)
    assert (set(origins) == {"target"}) == (mode == "off")
    assert all("verify" in {bar.lane for bar in step.timeline} for step in steps)


def test_what_a_grammar_or_the_caller_proposes_is_told_too(up: Process) -> None:
    """Tokens that were forced, and those of a prediction that was right; the text is the same as without."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "mode": "auto"}
    with Client(up.endpoint) as client:
        forced = {"choice": ["def push(self, item): return self.items.append(item)"]}
        text = client.generate(PROMPT, **options).text
        for origin, more in (("grammar", forced), ("prediction", {"prediction": text})):
            chunks = [
                one
                for one in client.stream(PROMPT, record_steps=True, **options, **more)
                if isinstance(one, Chunk)
            ]
            assert origin in {found for chunk in chunks for found in chunk.origins}
            expected = text if origin == "prediction" else forced["choice"][0]
            assert "".join(chunk.text for chunk in chunks) == expected


def test_the_pages_events_over_http(up: Process) -> None:
    """Tokens with their origins, trees whose parents come before their children, and all three lanes."""
    options = {"max_tokens": TOKENS, "temperature": 0, "speculation": {"mode": "sequential"}}
    body = json.dumps({"prompt": PROMPT, **options}).encode()
    request = urllib.request.Request(
        up.ready["http"] + "/outrider/stream", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line[6:] for line in answer.read().decode().split("\n") if line.startswith("data: {")]
    started, *chunks, complete = map(json.loads, lines)
    assert (started["type"], complete["type"]) == ("started", "complete")
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == TOKENS
    steps = [chunk["step"] for chunk in chunks if chunk["step"]]
    for step in steps:
        assert all(node["parent"] is None or node["parent"] < i for i, node in enumerate(step["nodes"]))
    assert {bar["lane"] for step in steps for bar in step["timeline"]} == {"draft", "wire", "verify"}


def _run(page: Page, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Run").click()


def _finished(page: Page) -> None:
    expect(page.get_by_role("status")).to_contain_text("Finished")


@needs_chromium
def test_both_texts_come_side_by_side(page: Page, up: Process) -> None:
    """They are the target's, each token says where it came from, and the page says that they are equal."""
    _run(page, Text_to_continue=PROMPT, Max_tokens=str(TOKENS), Temperature="0.8", Seed="3")
    _finished(page)
    with Client(up.endpoint) as client:
        text = client.generate(PROMPT, max_tokens=TOKENS, temperature=0.8, seed=3).text
    drafted = page.get_by_role("region", name="Text: with drafts")
    alone = page.get_by_role("region", name="Text: the target alone")
    assert (drafted.text_content(), alone.text_content()) == (text, text)
    expect(page.get_by_text("Both texts are equal, token by token.").first).to_be_visible()
    assert alone.locator("[data-origin=target]").count() == alone.locator(".token").count()
    proposed = drafted.locator("[data-origin=draft], [data-origin=lookup]")
    assert proposed.count() > 0
    assert "step" in (proposed.first.get_attribute("title") or "")
    lines = proposed.first.evaluate("token => getComputedStyle(token).textDecorationLine")
    assert lines == "underline", "not by colour alone"
    assert page.locator(".lanes .bar-draft").count() > 0
    assert page.locator(".lanes .bar-verify").count() > 0
    rates = [float(rate) for rate in page.locator(".rate strong").all_inner_texts()]
    assert len(rates) == 2
    assert min(rates) > 0


@needs_chromium
def test_steps_are_looked_at_with_the_keyboard(page: Page) -> None:
    """The arrow keys go from step to step: tree, tokens and sentence follow."""
    page.get_by_label("Then run the target alone").uncheck()
    _run(page, Text_to_continue=PROMPT, Max_tokens=str(TOKENS))
    _finished(page)
    slider, summary = page.get_by_role("slider", name="Step"), page.locator("#step-summary")
    slider.press("Home")
    expect(summary).to_contain_text("Step 1 of")
    for step in (2, 3, 4):
        slider.press("ArrowRight")
        expect(summary).to_contain_text(f"Step {step} of")
        assert slider.get_attribute("aria-valuetext") == summary.inner_text()
        marked = page.locator(".token.marked")
        assert {token.get_attribute("data-step") for token in marked.all()} == {str(step - 1)}
        assert marked.first.evaluate(SEEN), "the text is scrolled to the tokens of the step"
        told = re.search(r"(\d+) of (\d+) candidates", summary.inner_text())
        nodes, accepted = page.locator("#tree .node"), page.locator("#tree .node.accepted")
        own = page.locator("#tree [data-origin=target]").count()
        assert (nodes.count() - own, accepted.count() - own) == (
            (int(told[2]), int(told[1])) if told else (0, 0)
        )


@needs_chromium
def test_a_run_can_be_stopped(page: Page) -> None:
    """What has come stays, nothing is said to be wrong, and the next run can begin."""
    _run(page, Max_tokens=LONG)
    expect(page.locator(".text .token").nth(5)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.locator("#error")).to_have_text("")
    assert 5 < page.locator(".text .token").count() < 2 * int(LONG), "of two texts"
    expect(page.get_by_role("button", name="Run")).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


@needs_chromium
def test_errors_are_sentences(page: Page) -> None:
    """As the service says them."""
    _run(page, Max_tokens="90000")
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    expect(page.get_by_role("button", name="Run")).to_be_enabled()


@needs_chromium
def test_a_chat(page: Page) -> None:
    """With a system message; the two texts are equal again."""
    page.get_by_label("Chat").check()
    page.get_by_label("System message").fill("Answer in code.")
    page.get_by_label("Message", exact=True).fill("Write a stack.")
    _run(page, Max_tokens="16")
    _finished(page)
    expect(page.locator("#comparison")).to_contain_text("Both texts are equal")


@needs_chromium
def test_ids_are_there_to_copy(page: Page, context: BrowserContext) -> None:
    """Request, trace and seed; the clipboard has what was shown."""
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("Then run the target alone").uncheck()
    _run(page, Max_tokens="8")
    _finished(page)
    shown = page.locator("#ids code").all_inner_texts()
    assert re.fullmatch(r"[0-9a-f]{16}", shown[0])
    assert re.fullmatch(r"[0-9a-f]{32}", shown[1])
    page.get_by_role("button", name="Copy with drafts: trace").click()
    expect(page.get_by_role("button", name="Copy with drafts: trace")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == shown[1]


@needs_chromium
def test_every_field_has_a_name_and_is_reached_with_the_tab_key(page: Page) -> None:
    """In the order in which they are read; the request can be sent with the keyboard alone."""
    names = []
    page.get_by_role("radio", name="Text").focus()
    for _ in range(8):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("document.activeElement.labels?.[0]?.innerText ?? document.activeElement.innerText")
        )
    expected = ["Text to continue", "Temperature", "Max tokens", "Seed", "Then run", "Bearer token", "Run"]
    assert [
        name.strip().split("\n")[0][: len(want)] for name, want in zip(names, expected, strict=False)
    ] == expected
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Text to continue").press("Control+Enter")
    _finished(page)


@needs_chromium
def test_the_page_is_usable_on_a_small_screen(page: Page) -> None:
    """Nothing is wider than the screen."""
    page.set_viewport_size({"width": NARROW, "height": 700})
    _run(page, Max_tokens=str(TOKENS))
    _finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW


@needs_chromium
def test_the_page_follows_the_scheme_and_rests_where_motion_is_unwanted(page: Page) -> None:
    """Dark where that is preferred; with less motion the lanes do not glide."""
    page.emulate_media(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    _run(page, Max_tokens=str(TOKENS))
    _finished(page)
    drawn = page.locator(".lanes svg").first
    before = drawn.get_attribute("viewBox")
    page.get_by_role("slider").press("Home")
    expect(page.locator("#step-summary")).to_contain_text("Step 1 of")
    after = drawn.get_attribute("viewBox")
    assert before != after
    page.wait_for_timeout(300)
    assert drawn.get_attribute("viewBox") == after


@needs_chromium
def test_a_bearer_token_is_sent_and_not_kept(context: BrowserContext, tmp_path: Any) -> None:
    """Without it the page says what is missing; a reload forgets it."""
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret\n")
    flags = ("--auth-tokens-file", str(tokens))
    with serving(FakeOrchestrator()) as (fake, endpoint), gateway(endpoint, *flags) as served:
        page = context.new_page()
        page.goto(served.url)
        _run(page)
        expect(page.get_by_role("alert")).to_contain_text("Bearer")
        page.get_by_text("Bearer token").click()
        page.get_by_label("Sent with each request").fill("s3cret")
        page.get_by_role("button", name="Run").click()
        _finished(page)
        assert fake.metadata[0]["authorization"] == "Bearer s3cret"
        page.reload()
        assert page.locator("#token").input_value() == ""
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert context.cookies() == []
