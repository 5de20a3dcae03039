"""`outrider generate` and `timeline` against a fake orchestrator: what is sent, printed and written."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import grpc
import pytest

from outrider.cli import generate
from outrider.cli.main import main
from outrider.client.retries import Retries
from outrider.protocol.errors import (
    InternalError,
    InvalidRequest,
    NoReplica,
    OutriderError,
    Overloaded,
    Unauthenticated,
    UnknownModel,
)
from outrider.telemetry.metrics_page import serve_metrics
from outrider.v1 import generation_pb2, tokens_pb2
from tests.unit.client.fake_orchestrator import SEED, FakeOrchestrator


def test_text_goes_to_standard_output_and_nothing_else(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output can be piped; the summary goes elsewhere and only on demand."""
    assert main(["generate", "count"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("one two three", "")
    assert main(["generate", "count", "--stats"]) == 0
    assert "3 tokens in" in (summary := capsys.readouterr().err)
    assert "1 steps of 2.00 tokens; hit rate 100%; pipeline efficiency 95%" in summary


def test_json_has_everything(orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with tokens, counts and the seed in full precision."""
    main(["generate", "count", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["token_ids"]) == ("one two three", [11, 12, 13])
    assert (found["finish_reason"], found["resumptions"]) == ("stop", 0)
    assert found["usage"]["prompt_tokens"] == 3
    assert found["speculation"]["hits"] == 1
    assert found["seed"] == SEED


def test_flags_become_the_request(orchestrator: FakeOrchestrator) -> None:
    """Every flag arrives in its field, and a flag that was not given stays absent."""
    flags = (
        "--max-tokens 5 --temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 "
        "--presence-penalty 0.3 --frequency-penalty 0.2 --seed 9 --min-tokens 2 --logprobs 3 --stop END "
        "--stop-token-ids 4,5 --logit-bias 7=-1.5 --ignore-eos --mode sequential --max-nodes 8 "
        "--max-depth 4 --model demo --task code --priority -3 --token t0ps3cret"
    )
    main(["generate", "count", "--json", *flags.split()])
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
    assert not orchestrator.requests[1].speculation.HasField("prediction")
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


def test_standard_input_is_text_in_utf_8(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the terminal's encoding is; other bytes are refused as those of a file are."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é".encode()), encoding="latin-1"))
    main(["generate"])
    assert orchestrator.requests[0].text == "é"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), errors="surrogateescape"))
    assert main(["generate"]) == 2
    said = "prompt: standard input is no text in UTF-8; pipe in another"
    assert capsys.readouterr().err == f"outrider: {said}\n"


def test_a_wrong_token_is_named_by_its_flag(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its place in the list."""
    orchestrator.error = InvalidRequest("token_ids.ids[1]", "token 99 is outside the vocabulary")
    assert main(["generate", "--token-ids", "3,99"]) == 2
    assert capsys.readouterr().err == "outrider: --token-ids[1]: token 99 is outside the vocabulary\n"


def test_a_refusal_is_one_sentence(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orchestrator's words reach the user; the exit status says that it failed."""
    orchestrator.error = Overloaded("the queue is full; try again in 1 s")
    assert main(["generate", "count"]) == 1
    assert capsys.readouterr().err == "outrider: the queue is full; try again in 1 s\n"


UNAVAILABLE, INTERNAL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL


def test_a_broken_stream_is_resumed(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is asked for with the seed, model and tokens that came; the text is whole, stderr says why."""
    orchestrator.breaks = [(1, UNAVAILABLE), (1, INTERNAL)]
    assert main(["generate", "count", "--temperature", "1", "--task", "t", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["text"], found["token_ids"]) == ("one two three", [11, 12, 13])
    assert found["resumptions"] == 2
    first, second, third = orchestrator.requests
    assert not first.sampling.HasField("seed")
    for request, tokens in ((second, [11]), (third, [11, 12])):
        assert list(request.resume_token_ids) == tokens
        assert (request.text, request.task, request.sampling.temperature) == ("count", "t", 1.0)
        assert (request.sampling.seed, request.model) == (SEED, "demo")
    assert "outrider: the stream broke after 1 token (UNAVAILABLE: gone); resuming it\n" in captured.err


def test_a_stream_that_brings_nothing_more_is_given_up(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempts are bounded, and what failed is one sentence."""
    monkeypatch.setattr(generate, "RETRIES", Retries((), (0.0, 0.0)))
    orchestrator.breaks = [(1, UNAVAILABLE), *[(0, UNAVAILABLE)] * 9]
    assert main(["generate", "count"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "one "
    assert len(orchestrator.requests) == 3
    last = captured.err.splitlines()[-1]
    assert last == "outrider: the stream broke after 1 token and cannot be resumed: UNAVAILABLE: gone"


def test_a_prediction_is_read_from_its_file(orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    """As text."""
    (tmp_path / "before.py").write_text("def f():\n")
    main(["generate", "count", "--prediction", str(tmp_path / "before.py")])
    assert orchestrator.requests[0].speculation.prediction.text == "def f():\n"


@pytest.mark.parametrize(("begins", "status"), [(False, UNAVAILABLE), (True, grpc.StatusCode.NOT_FOUND)])
def test_what_cannot_be_resumed_ends_at_once(
    orchestrator: FakeOrchestrator, begins: bool, status: grpc.StatusCode
) -> None:
    """An orchestrator that does not tell the seed, and an error that would come again."""
    orchestrator.begins = begins
    orchestrator.breaks = [(1, status)]
    assert main(["generate", "count"]) == 1
    assert len(orchestrator.requests) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--token-ids", "a,b"], "--token-ids: must be numbers"),
        (["x", "--logit-bias", "7"], "--logit-bias: must be ID=X"),
        (["--file", "/no/such/file"], "--file: cannot read"),
        (["x", "--file", "y"], "prompt: does not go with --file; leave one of them out"),
        (["--chat", "--token-ids", "1"], "--chat: does not go with --token-ids; leave one of them out"),
        (["x", "--system", "y"], "--system: needs --chat"),
        (["x", "--top-k", "-1"], "--top-k: -1 is out of the range of its field; use 0 or more"),
        (["x", "--max-nodes", "-1"], "--max-nodes: -1 is out of the range of its field; use 0 or more"),
        (["x", "--priority", "99999999999"], "--priority: 99999999999 is out of the range of its field"),
        (["--file", "/"], "--file: cannot read '/' (Is a directory); name another file"),
        (["--file", ""], "--file: cannot read '' (Is a directory); name another file"),
        (["x", "--json-schema", ""], "--json-schema: cannot read ''"),
        (["--file", "/bin/sh"], "--file: '/bin/sh' is no text in UTF-8; name another file"),
        (["x", "--tls-cert", "cert.pem"], "--tls-key: must be set"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent when the request cannot be meant, and no traceback is shown."""
    assert main(["generate", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: {sentence}")


def test_log_probabilities_are_asked_for_only_where_they_are_shown(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON; elsewhere they would cost time and be thrown away."""
    assert main(["generate", "x", "--logprobs", "2"]) == 2
    assert capsys.readouterr().err == "outrider: --logprobs: needs --json, which prints them\n"
    assert main(["timeline", "x", "--output", "x.html", "--logprobs", "2"]) == 2
    assert "--logprobs is no flag of outrider timeline" in capsys.readouterr().err
    assert orchestrator.requests == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("steps.png", "--output: 'steps.png' must end in"),
        ("/no/such/folder/steps.svg", "--output: there is no folder '/no/such/folder'"),
    ],
)
def test_a_picture_that_cannot_be_written_is_not_asked_for(
    path: str, sentence: str, orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's name is looked at before the request is sent."""
    assert main(["timeline", "x", "--output", path]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: {sentence}")
    assert orchestrator.requests == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--endpoint", "nonsense"), ("--endpoint", "host:port"), ("--timeout", "0"), ("--timeout", "nan")],
)
def test_a_value_that_no_request_can_have_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for any other flag: a sentence, status 2."""
    with pytest.raises(SystemExit) as end:
        main(["generate", "x", flag, value])
    assert end.value.code == 2
    assert f"outrider: {flag}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownModel("a", "b"), 2),
        (Unauthenticated("authorization: send a bearer token"), 2),
        (InvalidRequest("sampling.top_p", "must be between 0 and 1"), 2),
        (NoReplica("no verify replica is known yet"), 1),
        (InternalError("a mistake of ours"), 1),
    ],
)
def test_what_is_asked_wrongly_is_told_from_what_fails(
    orchestrator: FakeOrchestrator, error: OutriderError, status: int
) -> None:
    """The exit status says whether to change the request or to try it again."""
    orchestrator.error = error
    assert main(["generate", "count"]) == status


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing orchestrator is the most common mistake of a first try."""
    assert main(["generate", "x", "--endpoint", "127.0.0.1:1"]) == 1
    assert "cannot reach 127.0.0.1:1" in capsys.readouterr().err


def test_a_page_of_metrics_is_told_from_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Its server answers, but not as gRPC does."""
    port = serve_metrics(0, "127.0.0.1")
    assert main(["generate", "x", "--endpoint", f"127.0.0.1:{port}"]) == 2
    assert f"127.0.0.1:{port} answers, but does not speak gRPC; give" in capsys.readouterr().err


def test_timelines_are_written_in_every_form(orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    """The end of the file's name says which."""
    saved, page, picture = (tmp_path / f"steps.{kind}" for kind in ("json", "html", "svg"))
    for output in (saved, page, picture):
        assert main(["timeline", "x", "--output", str(output)]) == 0
    assert all(request.record_timeline for request in orchestrator.requests)
    assert json.loads(saved.read_text())["traceEvents"]
    assert "4 nodes" in page.read_text()
    assert picture.read_text().startswith("<svg")


def test_ctrl_c_ends_the_wait_for_a_piped_prompt(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read itself is interrupted: standard input may never come to its end."""
    waited = []

    class Interrupted(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            waited.append("on")
            return "count"

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert (main(["generate"]), waited) == (130, [])
