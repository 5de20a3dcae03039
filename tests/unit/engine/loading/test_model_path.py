"""Which names are folders, which are hub ids, and what is said where a name could be either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.engine.loading.model_path import cannot_load, check_model_path, name_of
from outrider.protocol.errors import ModelError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model in it and a file."""
    (tmp_path / "models/demo/target").mkdir(parents=True)
    (tmp_path / "weights.bin").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["models/demo/target", "models/demo", "./models", "gpt2", "owner/a-model.v1"]
)
def test_folders_and_hub_ids_pass(name: str) -> None:
    """What exists is a folder; one name, or an owner that is no folder here and a name, may be on the hub."""
    check_model_path(name)


@pytest.mark.parametrize(
    "name",
    [
        "models/demo/tarhet",
        "/nowhere",
        "./gpt2",
        "../nowhere",
        "~nobody/model",
        "a b",
        "gpt2/",
        "weights.bin",
    ],
)
def test_a_path_to_nothing_is_a_missing_folder(name: str) -> None:
    """More than one slash, a leading dot, a file: no hub id looks like this."""
    with pytest.raises(ModelError, match=f"there is no folder '{name}'; give a folder"):
        check_model_path(name)


@pytest.mark.parametrize(
    ("model", "name"),
    [("models/demo/target/", "target"), ("owner/a-model.v1", "a-model.v1"), (".", ""), ("models/..", "")],
)
def test_the_name_of_a_model(folder: Path, model: str, name: str) -> None:
    """The last part of what was given; the working directory has a name too."""
    assert name_of(model) == (name or folder.name)


def test_a_name_in_a_folder_that_exists_is_a_path() -> None:
    """The hub is not asked; the sentence says how to mean it."""
    with pytest.raises(
        ModelError, match="there is no folder 'models/tarhet' in the folder 'models'; to mean a"
    ):
        check_model_path("models/tarhet")


def test_nothing_is_asked_for() -> None:
    """The sentence says what is missing."""
    with pytest.raises(ModelError, match="model: not set; give a folder"):
        check_model_path("")


def test_what_the_hub_does_not_have_may_have_been_a_folder() -> None:
    """Both readings of the name are in the sentence."""
    said = str(cannot_load("tarhet", "cannot be loaded (404)"))
    assert said.startswith(
        "model: there is no folder 'tarhet', and as a hub id it cannot be loaded (404); give"
    )
    assert str(cannot_load("models", "cannot be loaded (x)")).startswith(
        "model: 'models' cannot be loaded (x);"
    )


def test_a_name_that_is_no_text_is_refused(folder: Path) -> None:
    """Services tell each other the model's name; bytes that are not UTF-8 could not be sent."""
    name = os.fsdecode(b"gr\xfcn")
    (folder / name).mkdir()
    with pytest.raises(ModelError, match="is not UTF-8; rename the folder"):
        check_model_path(name)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs_are_named(folder: Path, name: str) -> None:
    """A clone without git-lfs has small texts in place of large files: the sentence says how to get them."""
    model = folder / "models/demo/target"
    (model / "config.json").write_text("{}")
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 497\n")
    with pytest.raises(ModelError, match=f"{name} in .* run `git lfs pull` there"):
        check_model_path("models/demo/target")
