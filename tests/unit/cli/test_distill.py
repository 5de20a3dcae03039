"""`outrider distill` from prompts to a folder that a draft service loads."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.cli.distill import command
from outrider.cli.main import main
from outrider.collected import Collected
from outrider.distill import models
from outrider.distill.models import load_pair, save_draft
from outrider.distill.traffic import Window
from outrider.distill.training import Plan, Training
from outrider.protocol.errors import ConfigError
from tests.models import build_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a target and a draft."""
    base = tmp_path_factory.mktemp("models")
    target, draft = build_model("llama", base / "target"), build_model("qwen2", base / "draft", seed=5)
    return ["--target", str(target), "--draft", str(draft)]


def prompts(folder: Path) -> str:
    """A file with token ids and a text."""
    path = folder / "prompts.json"
    path.write_text(json.dumps([[5, 6, 7, index] for index in range(2, 30)] + ["The quick brown fox"]))
    return str(path)


def flags(folder: Path, **more: str) -> list[str]:
    """A short training."""
    given = {"prompts": prompts(folder), "out": str(folder / "new"), "tokens": "12", "held-out": "0.3"}
    given |= {"rate": "0.003", "batch": "4", "passes": "6"} | more
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def test_a_draft_is_trained_and_the_command_to_use_it_printed(pair, tmp_path, capsys):
    """Acceptance before and after, on texts that were not learned."""
    assert main(["distill", *pair, *flags(tmp_path)]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[-1] == f"outrider serve draft --model {tmp_path / 'new'}"
    report = json.loads((tmp_path / "new/distilled.json").read_text())
    assert report["after"]["acceptance"] > report["before"]["acceptance"]
    assert "tokens/s" in output.err
    assert "min left" in output.err
    assert not (tmp_path / "new.partial").exists()
    assert main(["distill", *pair, *flags(tmp_path)]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err


def test_the_target_may_write_more_after_collected_prompts(pair, tmp_path, capsys):
    """So many texts for each prompt, beside those that were collected."""
    vocabulary = load_pair(pair[1], pair[3], dtype="auto", device="cpu", threads=1).vocabulary
    served = [Collected(vocabulary, "code", 3, (5, 6, 7 + index, 9, 11)) for index in range(20)]
    (tmp_path / "collected-1.jsonl").write_text("".join(one.line() for one in served))
    given = flags(tmp_path, temperature="1", answers="3", passes="0.1")
    given[given.index("--prompts") : given.index("--prompts") + 2] = ["--collected", str(tmp_path)]
    assert main(["distill", *pair, *given]) in (0, 1)  # so short a training may bring nothing
    said = capsys.readouterr().err
    assert "has written 60 of 60 texts" in said
    learnt, held_out = map(int, re.search(r"(\d+) texts to learn from, (\d+) held out", said).groups())
    assert learnt + held_out == 80


def test_ctrl_c_stops_and_the_same_command_goes_on(pair, tmp_path, capsys, monkeypatch):
    """From the checkpoint; other flags are refused meanwhile."""
    told = command._ProgressPrinter.__call__

    def interrupt(teller, progress):
        told(teller, progress)
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(command._ProgressPrinter, "__call__", interrupt)
        assert main(["distill", *pair, *flags(tmp_path)]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["distill", *pair, *flags(tmp_path, rate="0.002")]) == 2
    assert "begun with other flags" in capsys.readouterr().err
    assert main(["distill", *pair, *flags(tmp_path)]) == 0
    assert "going on at step 3" in capsys.readouterr().err
    assert (tmp_path / "new/model.safetensors").exists()


def test_low_rank_updates_end_in_an_ordinary_draft(pair, tmp_path, capsys):
    """Its file has the names, sizes and types of the old draft's; what is no linear layer is as it was."""
    assert main(["distill", *pair, *flags(tmp_path, lora="4", rate="0.01")]) == 0
    assert capsys.readouterr().out.endswith(f"outrider serve draft --model {tmp_path / 'new'}\n")
    new, old = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "new", pair[3]))
    kinds = [{name: (one.shape, one.dtype) for name, one in weights.items()} for weights in (new, old)]
    assert kinds[0] == kinds[1]
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert all(name.endswith("proj.weight") for name in changed)


def test_a_draft_that_is_no_better_is_not_saved(pair, tmp_path, capsys):
    """The status says so, for whoever runs it by the clock."""
    same = ["--target", pair[1], "--draft", pair[1]]
    assert main(["distill", *same, *flags(tmp_path, passes="0.1")]) == 1
    assert "nothing was saved" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_texts_that_cannot_be_divided_are_refused(pair, tmp_path, capsys, monkeypatch):
    """Before the models are loaded; another share is taken then."""
    monkeypatch.setattr("outrider.distill.models.load_pair", None)
    assert main(["distill", *pair, *flags(tmp_path, **{"held-out": "0.999"})]) == 2
    said = capsys.readouterr().err
    assert "--held-out: the texts after 29 prompts cannot be divided" in said
    assert not (tmp_path / "new.partial").exists()


def test_a_full_disk_leaves_no_half_file(pair, tmp_path):
    """So that the same command goes on once there is room; the error is one that names the reason."""
    loaded = load_pair(pair[1], pair[3], dtype="auto", device="cpu", threads=1)
    training = Training(loaded, [Window((1, 2, 3), 1, "")], Plan(1.0, 0.0, 1, 0.1, 0))
    for path, write in (
        (tmp_path / "before.json", lambda path: command._write(path, "{}")),
        (tmp_path / "state.pt", training.save),
    ):
        path.with_suffix(".making").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            write(path)
        assert not path.exists()


def test_weights_that_cannot_be_written_are_one_sentence(pair, tmp_path, monkeypatch):
    """And nothing of them stays."""
    loaded = load_pair(pair[1], pair[3], dtype="auto", device="cpu", threads=1)

    def full(folder):
        Path(folder).mkdir()
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(loaded.draft, "save_pretrained", full)
    with pytest.raises(ConfigError, match=r"--out: cannot write the draft .No space left"):
        save_draft(loaded, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_saves_nothing_is_refused(pair, tmp_path, capsys):
    """Before the target writes anything."""
    assert main(["distill", *pair, *flags(tmp_path, lora="64")]) == 2
    assert "--lora: updates of rank 64" in capsys.readouterr().err
    assert not (tmp_path / "new.partial/texts.jsonl").exists()


@pytest.mark.parametrize(("answers", "why"), [("0", "has to write"), ("2", "equal at temperature 0")])
def test_answers_that_bring_nothing_are_refused(pair, tmp_path, capsys, answers, why):
    """Before a model is loaded."""
    assert main(["distill", *pair, *flags(tmp_path, answers=answers)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--batch", "0"], "--batch"),
        (["--held-out", "1"], "--held-out"),
        (["--passes", "x"], "--passes"),
        (["--passes", "inf"], "--passes"),
        (["--lora", "0"], "--lora"),
        (["--answers", "-1"], "--answers"),
    ],
)
def test_wrong_flags_are_named(pair, tmp_path, capsys, wrong, named):
    """Before a model is loaded."""
    with pytest.raises(SystemExit) as end:
        main(["distill", *pair, *flags(tmp_path), *wrong])
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_work_whose_flags_were_not_written_is_not_continued(pair, tmp_path, capsys):
    """As when the disk was full: nobody knows what its files belong to."""
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial/flags.json").touch()
    assert main(["distill", *pair, *flags(tmp_path)]) == 2
    assert "was begun with other flags; remove it, or name another folder" in capsys.readouterr().err


def test_prompts_that_the_target_cannot_continue_are_refused(pair, tmp_path, capsys):
    """Those with tokens that it does not have, and those whose texts are longer than its context."""
    path = tmp_path / "strange.json"
    path.write_text(json.dumps([[5, number, 999999] for number in range(30)]))
    assert main(["distill", *pair, *flags(tmp_path, prompts=str(path))]) == 2
    assert "outrider: --prompts: token 999999 is not in the vocabulary" in capsys.readouterr().err
    assert main(["distill", *pair, *flags(tmp_path, tokens="99999")]) == 2
    assert "lower --tokens, or shorten the prompts" in capsys.readouterr().err


def test_prompts_are_read_before_the_models(pair, tmp_path, capsys, monkeypatch):
    """Large models load for minutes, after which nobody wants to hear that a file is missing."""
    monkeypatch.setattr(models, "load_pair", lambda *_, **__: pytest.fail("loaded"))
    assert main(["distill", *pair, *flags(tmp_path, prompts=str(tmp_path / "none"))]) == 2
    assert "outrider: --prompts: cannot read" in capsys.readouterr().err


def test_what_cannot_begin_leaves_nothing_behind(pair, tmp_path, capsys):
    """So that the corrected command is not refused; the flag with the mistake is named."""
    assert main(["distill", "--target", "/nowhere", *pair[2:], *flags(tmp_path)]) == 2
    assert "outrider: --target: there is no folder '/nowhere'" in capsys.readouterr().err
    assert main(["distill", *pair, *flags(tmp_path, prompts=str(tmp_path / "none"))]) == 2
    assert "outrider: --prompts: cannot read" in capsys.readouterr().err
    assert main(["distill", *pair, *flags(tmp_path), "--task", "code"]) == 2
    assert "outrider: --task: chooses among collected tokens; add --collected" in capsys.readouterr().err
    assert not (tmp_path / "new.partial").exists()
