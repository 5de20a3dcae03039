"""`outrider generate` and `timeline` against a fake orchestrator: what is sent, printed and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.cli.main import main
from outrider.errors import Overloaded
from outrider.rpc_errors import DETAILS_KEY, code_of, details_of
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2


class FakeOrchestrator(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every request with two chunks; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.error: Overloaded | None = None

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.error is not None:
            context.set_trailing_metadata(((DETAILS_KEY, details_of(self.error)),))
            context.abort(code_of(self.error), str(self.error))
        for text, token in (("one ", 11), ("two", 12)):
            yield generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text=text, token_ids=[token]))
        yield generation_pb2.GenerateResponse(complete=_complete(request.record_timeline))


def _complete(timeline: bool) -> generation_pb2.Complete:
    event = generation_pb2.TimelineEvent(
        lane=generation_pb2.TimelineEvent.LANE_VERIFY,
        start_unix_nano=10**18,
        duration_micros=500,
        name="forward",
        step=1,
        nodes=4,
        accepted=1,
    )
    return generation_pb2.Complete(
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
        usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=2),
        speculation=generation_pb2.SpeculationStats(
            steps=1, hits=1, acceptance_length=2.0, decode_micros=200, decode_busy_micros=190
        ),
        seed=2**64 - 1,
        model="demo",
        timeline=[event] if timeline else [],
    )


@pytest.fixture
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOrchestrator]:
    """A fake orchestrator where the command finds it."""
    fake = FakeOrchestrator()
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OUTRIDER_ENDPOINT", f"127.0.0.1:{port}")
    yield fake
    server.stop(None)


def test_text_goes_to_standard_output_and_nothing_else(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output can be piped; the summary goes elsewhere and only on demand."""
    assert main(["generate", "count"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("one two", "")
    assert main(["generate", "count", "--stats"]) == 0
    assert "2 tokens in" in (summary := capsys.readouterr().err)
    assert "1 steps of 2.00 tokens; hit rate 100%; pipeline efficiency 95%" in summary


def test_json_has_everything(orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with tokens, counts and the seed in full precision."""
    main(["generate", "count", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("one two", [11, 12], "stop")
    assert found["usage"]["prompt_tokens"] == 3
    assert found["speculation"]["hits"] == 1
    assert found["seed"] == 2**64 - 1


def test_flags_become_the_request(orchestrator: FakeOrchestrator) -> None:
    """Every flag arrives in its field, and a flag that was not given stays absent."""
    flags = (
        "--max-tokens 5 --temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 "
        "--presence-penalty 0.3 --frequency-penalty 0.2 --seed 9 --min-tokens 2 --logprobs 3 --stop END "
        "--stop-token-ids 4,5 --logit-bias 7=-1.5 --ignore-eos --mode sequential --max-nodes 8 "
        "--max-depth 4 --model demo --task code --priority -3 --token t0ps3cret"
    )
    main(["generate", "count", *flags.split()])
    (request,) = orchestrator.requests
    assert request.text == "count"
    assert request.sampling == tokens_pb2.SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=9,
        min_tokens=2,
        logprobs=3,
        stop=["END"],
        stop_token_ids=[4, 5],
        logit_bias={7: -1.5},
        ignore_eos=True,
    )
    assert request.speculation == generation_pb2.SpeculationParams(
        mode=generation_pb2.MODE_SEQUENTIAL, max_nodes=8, max_depth=4
    )
    assert (request.model, request.task, request.priority) == ("demo", "code", -3)
    assert orchestrator.metadata[0]["authorization"] == "Bearer t0ps3cret"
    main(["generate", "count"])
    assert orchestrator.requests[1].sampling == tokens_pb2.SamplingParams()


def test_prompts_of_every_kind(
    orchestrator: FakeOrchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, file, standard input, token ids and a conversation."""
    (tmp_path / "prompt.txt").write_text("from a file")
    main(["generate", "--file", str(tmp_path / "prompt.txt")])
    monkeypatch.setattr("sys.stdin", (tmp_path / "prompt.txt").open())
    main(["generate", "-"])
    main(["generate", "--token-ids", "3,4 5"])
    main(["generate", "hello", "--chat", "--system", "be brief"])
    file, stdin, ids, chat = orchestrator.requests
    assert file.text == stdin.text == "from a file"
    assert list(ids.token_ids.ids) == [3, 4, 5]
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]


def test_a_refusal_is_one_sentence(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orchestrator's words reach the user; the exit status says that it failed."""
    orchestrator.error = Overloaded("the queue is full; try again in 1 s")
    assert main(["generate", "count"]) == 1
    assert capsys.readouterr().err == "outrider: the queue is full; try again in 1 s\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--token-ids", "a,b"], "--token-ids: must be numbers"),
        (["x", "--logit-bias", "7"], "--logit-bias: must be ID=X"),
        (["x", "--timeline", "steps.png"], "--timeline: 'steps.png' must end in"),
        (["--file", "/no/such/file"], "--file: cannot read"),
        (["x", "--top-k", "-1"], "request: a number is out of the range"),
        (["x", "--tls-cert", "cert.pem"], "tls_client_key: must be set"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent when the request cannot be meant, and no traceback is shown."""
    assert main(["generate", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: {sentence}")


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing orchestrator is the most common mistake of a first try."""
    assert main(["generate", "x", "--endpoint", "127.0.0.1:1"]) == 1
    assert "cannot reach 127.0.0.1:1" in capsys.readouterr().err


def test_timelines_are_written_and_drawn_again(orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    """A request is recorded once as JSON and drawn later without another request."""
    saved, page, picture = (tmp_path / f"steps.{kind}" for kind in ("json", "html", "svg"))
    assert main(["generate", "x", "--timeline", str(saved)]) == 0
    assert main(["timeline", "--from-json", str(saved), "--output", str(page)]) == 0
    assert main(["timeline", "x", "--output", str(picture)]) == 0
    assert [request.record_timeline for request in orchestrator.requests] == [True, True]
    assert "4 nodes" in page.read_text()
    assert picture.read_text().startswith("<svg")
