"""`outrider advise` from its flags to its files, on tiny random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.cli.advise import command
from outrider.cli.main import main
from tests.models import build_model

MODELS = ["--target", "T", "--draft", "A", "--prompts", "prompts.jsonl"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A target, a draft, and prompts of two tasks."""
    build_model("llama", tmp_path / "target", num_hidden_layers=2)
    build_model("llama", tmp_path / "draft", seed=1, num_hidden_layers=1)
    prompts = [{"prompt": "The quick brown fox", "task": "tale"}, {"prompt": [5, 6, 7, 8], "task": "ids"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return tmp_path


def test_a_target_is_advised(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, lookup and the target without a layer are measured and simulated; the figures are written."""
    monkeypatch.setattr("simulator.pair.steps.ROUNDS", 1)
    monkeypatch.setattr("simulator.pair.draft_times.VERDICTS", 3)
    target, draft = str(models / "target"), str(models / "draft")
    words = ["advise", "--target", target, "--draft", draft, "--draft", "lookup", "--draft", target]
    words += ["--draft-skip-layers", "1", "--prompts", str(models / "prompts.jsonl"), "--tokens", "6"]
    words += ["--sessions", "1,3", "--json", str(models / "a.json")]
    assert main(words) == 0
    output = capsys.readouterr()
    last = output.out.splitlines()[-1]
    assert last.startswith(f"outrider up --target {target} --draft ")
    assert "simulating: 100%, about 0 s left" in output.err
    document = json.loads((models / "a.json").read_text())
    names = [draft, "lookup", f"{target} without 1"]
    assert [one["name"] for one in document["drafts"]] == names
    assert [rate["sessions"] for rate in document["without_drafts"]] == [1, 3]
    assert document["advice"]["command"] == last
    small, lookup, part = (one["size"]["weight_bytes"] for one in document["drafts"])
    assert 0 == lookup < small <= part < document["target_size"]["weight_bytes"]
    assert set(document["drafts"][0]["acceptance_by_task"]) == {"tale", "ids"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--draft-skip-layers", "1"], "add --draft T"),
        ([], "--target: there is no folder 'T'"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_is_loaded(
    more: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what to change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "T.txt").touch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "T").touch()
    assert main(["advise", *MODELS, *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_draft_of_another_vocabulary_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded."""
    other = build_model("llama", models / "other", vocab_size=280)
    words = ["--target", str(models / "target"), "--draft", str(other)]
    assert main(["advise", *words, "--prompts", str(models / "prompts.jsonl")]) == 2
    assert "use a draft with the target's tokenizer" in capsys.readouterr().err


def test_half_a_character_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No tokenizer takes it."""
    (models / "half.json").write_text('["\\ud800"]')
    words = ["--target", str(models / "target"), "--draft", str(models / "target")]
    assert main(["advise", *words, "--prompts", str(models / "half.json")]) == 2
    assert "has half a character" in capsys.readouterr().err


def test_an_eagle_head_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator has no features of the target to give it."""
    (models / "head").mkdir()
    (models / "head" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    words = ["--target", str(models / "target"), "--draft", str(models / "head")]
    assert main(["advise", *words, "--prompts", str(models / "prompts.jsonl")]) == 2
    assert "is an EAGLE head" in capsys.readouterr().err


def test_an_mtp_layer_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the same reason."""
    words = ["--target", str(models / "target"), "--draft", "mtp"]
    assert main(["advise", *words, "--prompts", str(models / "prompts.jsonl")]) == 2
    assert "an MTP layer is not simulated" in capsys.readouterr().err


def test_texts_longer_than_the_context_are_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what to lower."""
    words = ["--target", str(models / "target"), "--draft", "lookup", "--tokens", "600"]
    assert main(["advise", *words, "--prompts", str(models / "prompts.jsonl")]) == 2
    assert "lower --tokens" in capsys.readouterr().err


@pytest.mark.parametrize("sessions", ["0", "1,a", "", "5000"])
def test_sessions_are_counts(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which there are some."""
    with pytest.raises(SystemExit):
        main(["advise", *MODELS, "--sessions", sessions])
    assert "--sessions" in capsys.readouterr().err


def test_ctrl_c_ends_it_quietly(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the status that shells expect."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "study", interrupted)
    words = ["--target", str(models / "target"), "--draft", "lookup"]
    assert main(["advise", *words, "--prompts", str(models / "prompts.jsonl")]) == 130
    assert capsys.readouterr().out == ""


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Draft and target each need one."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert main(["advise", *MODELS]) == 2
    assert "two cores" in capsys.readouterr().err


def test_a_wrong_draft_is_refused_before_the_target_is_loaded(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights, or without the layers that it is to do without; the flag is named."""
    target, empty = str(models / "target"), models / "empty"
    shutil.copytree(models / "draft", empty)
    (empty / "model.safetensors").unlink()
    words = ["advise", "--target", target, "--prompts", str(models / "prompts.jsonl")]
    for more, said in (
        (["--draft", str(empty)], "--draft: "),
        (["--draft", target, "--draft-skip-layers", "7"], "--draft-skip-layers: "),
    ):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err.startswith(f"outrider: {said}")


def test_layers_that_are_no_list_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the prompts are read."""
    with pytest.raises(SystemExit):
        main(["advise", *MODELS, "--draft-skip-layers", "abc"])
    assert "--draft-skip-layers: must be a list of layers" in capsys.readouterr().err


def test_a_plan_has_one_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """Several are refused; the last would be planned with, and the others forgotten."""
    target = str(Path(__file__).resolve().parents[4] / "models/demo/target")
    assert main(["plan", "--target", target, "--draft", target, "--draft", target, "--gpu", "h100"]) == 2
    assert capsys.readouterr().err.startswith("outrider: --draft: given several times; plan with one draft")


def test_a_head_has_no_plan(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`outrider plan` says so, instead of a word about its tensors."""
    head = Path(__file__).resolve().parents[4] / "models/demo/eagle"
    words = ["plan", "--target", str(models / "target"), "--draft", str(head), "--gpu", "h100"]
    assert main(words) == 2
    assert "is an EAGLE head" in capsys.readouterr().err
