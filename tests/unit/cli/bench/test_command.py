"""`outrider bench` as a whole, against a fake orchestrator and a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.cli.main import main
from outrider.protocol.errors import Overloaded
from tests.unit.cli.bench.worlds import FakeOpenAi, chunked, event, whole
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving

SPEED = ("bench", "--requests", "4")


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    """A fake OpenAI server, in a thread of its own."""
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    answer = chunked(event({"choices": [{"text": "x"}]}), event({"choices": [], "usage": usage}))
    fake, ready = FakeOpenAi(whole({"data": [{"id": "peer"}]}), answer), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with fake.serving():
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    yield fake
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


def rows(out: str) -> list[str]:
    """The lines of a table, with single spaces."""
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_load_over_grpc(
    orchestrator: FakeOrchestrator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warm-up requests have other prompts and are not counted; the table goes to standard output."""
    out = tmp_path / "out.json"
    flags = ("--concurrency", "2", "--warm-up", "2", "--random-prompt-tokens", "5", "--seed", "9")
    assert main([*SPEED, *flags, "--json", str(out), "--slo", "e2e=60s", "--token", "s3cret"]) == 0
    captured = capsys.readouterr()
    assert "completed 4" in rows(captured.out)
    assert "goodput 100.0% within e2e <= 60 s" in rows(captured.out)
    assert captured.err == ""
    prompts = [tuple(request.token_ids.ids) for request in orchestrator.requests]
    assert len(set(prompts)) == 6
    assert {len(prompt) for prompt in prompts} == {5}
    assert sorted(request.sampling.seed for request in orchestrator.requests) == list(range(9, 15))
    assert orchestrator.metadata[-1]["authorization"] == "Bearer s3cret"
    found = json.loads(out.read_text())
    assert [request["output_tokens"] for request in found["requests"]] == [3] * 4
    assert found["summary"]["speculation"]["steps"] == 4
    assert found["machine"]["date"]


def test_a_prompts_file(orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    """Its prompts go round, the warm-up takes the next; with --chat they are a user's messages."""
    path = tmp_path / "prompts.json"
    path.write_text('["a", "b", "c"]')
    assert main(["bench", "--requests", "2", "--prompts", str(path)]) == 0
    assert [request.text for request in orchestrator.requests] == ["c", "a", "b"]
    assert main(["bench", "--requests", "1", "--warm-up", "0", "--chat", "--prompts", str(path)]) == 0
    assert orchestrator.requests[-1].chat.messages[0].content == "a"


def test_arrivals(orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]) -> None:
    """A request rate tells how late requests were sent."""
    assert main([*SPEED, "--request-rate", "inf"]) == 0
    assert "sent late" in capsys.readouterr().out


def test_a_load_over_http(server: FakeOpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    """The same report of a peer; prompts are words."""
    assert main([*SPEED, "--openai", server.url, "--random-prompt-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{server.url}, model peer\n")
    assert "input tokens 8" in rows(out)
    assert len(server.requests[-1][2]["prompt"].split()) == 3


def test_tokens_stay_with_their_service(server: FakeOpenAi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server gets the key for such servers, never Outrider's from the environment."""
    monkeypatch.setenv("OUTRIDER_TOKEN", "ours")
    assert main(["bench", "--requests", "1", "--openai", server.url]) == 0
    assert all("authorization" not in headers for _, headers, _ in server.requests)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert main(["bench", "--requests", "1", "--openai", server.url, "--model", "peer"]) == 0
    assert server.requests[-1][1]["authorization"] == "Bearer theirs"


def test_failures_are_status_1(orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]) -> None:
    """The report counts them."""
    orchestrator.error = Overloaded("all places are taken")
    assert main([*SPEED, "--warm-up", "0"]) == 1
    assert "failed: 4 OVERLOADED\nthe first, request 0: all places are taken" in capsys.readouterr().out


def test_a_failed_warm_up_ends_it(orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence instead of a report of nothing but failures."""
    orchestrator.error = Overloaded("all places are taken")
    assert main([*SPEED]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "outrider: all places are taken\n")


@pytest.mark.parametrize("flag", ["--endpoint", "--openai"])
def test_nobody_there(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 and a sentence with the address."""
    address = "127.0.0.1:1" if flag == "--endpoint" else "http://127.0.0.1:1/v1"
    assert main([*SPEED, flag, address]) == 1
    assert capsys.readouterr().err.startswith(f"outrider: cannot reach {address}")


class Interrupting(FakeOrchestrator):
    """Sends this process an interrupt instead of a fourth answer."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        if len(self.requests) == 3:
            self.answers.clear()
            os.kill(os.getpid(), signal.SIGINT)
        yield from super().Generate(request, context)


def test_an_interrupt_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the load; the requests that ended are reported, and the status is 130."""
    with serving(Interrupting()) as (fake, endpoint):
        assert main(["bench", "--endpoint", endpoint, "--requests", "9", "--warm-up", "0"]) == 130
        fake.answers.set()
    out = capsys.readouterr().out
    assert "completed 3" in rows(out)
    assert "1 requests were cut short and 5 not sent" in out


WRONG = (
    ("--concurrency 0", "outrider: --concurrency: must be a whole number of 1 or more, not '0'"),
    ("--requests many", "outrider: --requests: must be a whole number of 1 or more, not 'many'"),
    ("--warm-up -1", "outrider: --warm-up: must be a whole number of 0 or more, not '-1'"),
    ("--request-rate 0", "outrider: --request-rate: must be a number above 0 or inf, not '0'"),
    ("--request-rate nan", "outrider: --request-rate: must be a number above 0 or inf, not 'nan'"),
    ("--request-rate 1 --concurrency 2", "does not go with --request-rate"),
    ("--endpoint a:1 --openai http://a/v1", "does not go with --endpoint"),
    ("--openai localhost:8000", "outrider: --openai: must be such as http://host:8000/v1, not"),
    ("--openai http://[/v1", "outrider: --openai: must be such as http://host:8000/v1, not"),
    ("--openai http://:secret@a/v1", "outrider: --openai: must be such as http://host:8000/v1, not"),
    ("--slo ttft=5", "outrider: --slo: must be such as ttft=500ms,tpot=50ms,e2e=10s, not 'ttft=5'"),
    ("--extra-body [1]", "outrider: --extra-body: must be a JSON object, not '[1]'"),
    ("--extra-body " + "[" * 100_000, "outrider: --extra-body: must be a JSON object, not"),
    ("--prompts x --random-prompt-tokens 3", "does not go with --prompts"),
    ("--mode fast", "outrider: --mode: 'fast' is none of 'auto'"),
)
CONFLICTING = (
    ("--openai http://a/v1 --mode off", "outrider: --mode: goes with --endpoint; "),
    ('--extra-body {"a":1}', "outrider: --extra-body: goes with --openai\n"),
    ("--openai http://a/v1 --tls-ca x", "outrider: --openai: must begin with https://"),
    ("--openai https://a/v1 --tls-ca /none", "outrider: --tls-ca, --tls-cert or --tls-key: cannot be used"),
    ("--json /none/x.json", "outrider: --json: there is no folder '/none'; make it, or name another\n"),
    ("--json /", "outrider: --json: '/' is a folder; name a file\n"),
    ("--prompts /", "outrider: --prompts: cannot read '/' (Is a directory); name another file\n"),
    ("--prompts /none.json", "outrider: --prompts: cannot read '/none.json'"),
)


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_wrong_flags(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and a sentence that says what the flag takes."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *flags.split()])
    assert end.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said in sentence


@pytest.mark.parametrize(("flags", "said"), CONFLICTING)
def test_flags_that_do_not_go_together(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one sentence, before anything is sent."""
    assert main(["bench", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(said)
