"""New weights while sessions run: which files are taken up, and that sessions go on."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from draft_service.drafters.model import ModelDrafter
from draft_service.exchange import Watched, WeightExchange
from draft_service.files import files_of
from draft_service.load import load_drafter
from draft_service.mailbox import Exchange
from outrider.config import DraftConfig
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.weights_version import weights_version
from outrider.protocol.errors import ModelError
from outrider.protocol.messages import ModelInfo, SamplingParams
from outrider.telemetry.instruments import DraftInstruments
from tests.models import build_model
from tests.unit.draft_service.fakes import request, verdict
from tests.unit.draft_service.model_rig import CheckedRunner, Rig

INFO = ModelInfo("m", "v", 300, 512, replica="d0", incarnation="i0", version="old", shadow=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one vocabulary."""
    base = tmp_path_factory.mktemp("models")
    return [build_model("llama", base / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def loaded(folders: list[Path]) -> list[Any]:
    """Both, loaded."""
    return [load_model(str(folder), dtype="float32", device="cpu", threads=1) for folder in folders]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sessions_go_on_with_the_new_weights(loaded, temperature):
    """Every forward is then the new model's, over all that was committed; the old memory is free."""
    chance = random.Random(3)
    rig = Rig(loaded[0], num_pages=256)
    sampling = SamplingParams(temperature=temperature, seed=4)
    openings = [request((5, 9, 30, 31, 77, 5 + i), sampling=sampling) for i in range(3)]
    streams = [rig.open(opening) for opening in openings]
    committed = [list(opening.token_ids) for opening in openings]
    new = CheckedRunner(loaded[1], 256, 4)
    other = ModelDrafter(new, children=8, max_nodes=128)
    for step in range(1, 9):
        rig.run(6)
        if step == 4:
            rig._messages.append(Exchange(lambda: rig.drafter.exchange(other)))
        for (stream, _), tokens in zip(streams, committed, strict=True):
            children = list(rig.tree(stream).children)
            token = chance.choice(children) if children and step % 2 else chance.randrange(2, 300)
            rig.verdict(stream, verdict(len(tokens), token, step=step))
            tokens.append(token)
    rig.run(6)
    assert new.checked > 20
    assert rig.drafter.max_nodes == 128, "states of another size leave room for fewer candidates"
    assert rig.runner.pool.statistics().used == 0
    for (stream, outbox), tokens in zip(streams, committed, strict=True):
        assert rig.tree(stream).committed == tokens
        assert outbox.read(), "it still proposes"
        rig.close(stream)
    rig.step()
    assert new.pool.statistics().used == 0


def test_files_are_new_when_two_looks_saw_the_same(folders, tmp_path):
    """Neither while they are being written, nor twice."""
    link = tmp_path / "current"
    link.symlink_to(folders[0])
    watched = Watched(files_of(str(link)))
    assert not watched.is_new(files_of(str(link)))
    (tmp_path / "next").symlink_to(folders[1])
    os.replace(tmp_path / "next", link)
    assert not watched.is_new(files_of(str(link)))
    assert watched.is_new(files_of(str(link)))
    assert not watched.is_new(files_of(str(link)))
    assert files_of(str(tmp_path / "none")) == ()
    assert not watched.is_new(())
    assert not watched.is_new(())


def test_files_that_change_while_they_are_loaded_are_loaded_again(folders, tmp_path, monkeypatch):
    """The version is read after the weights, and would be that of others."""
    link, loads = tmp_path / "current", []
    link.symlink_to(folders[0])

    def load(config, replica):
        loads.append(os.readlink(link))
        if len(loads) == 1:
            (tmp_path / "next").symlink_to(folders[1])
            os.replace(tmp_path / "next", link)
        return Drafter(), INFO

    monkeypatch.setattr("draft_service.load._loaded", load)
    load_drafter(DraftConfig(model=str(link)), "d0")
    assert loads == [str(folder) for folder in folders]


def test_a_version_is_that_of_the_files(folders, tmp_path):
    """Wherever they are, and whatever else is there; settings that change the model change it."""
    first, second = (weights_version(str(folder)) for folder in folders)
    copy = tmp_path / "copy"
    copy.symlink_to(folders[0])
    assert first == weights_version(str(copy)) != second
    assert len(first) == 8
    assert weights_version(str(copy), "4-5") != first
    with pytest.raises(ModelError):
        weights_version(str(tmp_path / "none"))


class Engine:
    """Applies at once."""

    def exchange(self, apply):
        """See DraftEngine."""
        apply()


class Drafter:
    """Remembers what it was given."""

    given = None

    def exchange(self, other):
        """See ModelDrafter."""
        self.given = other


class Servicer:
    """Has an info."""

    info = INFO


def exchange(load) -> tuple[WeightExchange, CollectorRegistry]:
    """One that loads what the test says."""
    registry = CollectorRegistry()
    return WeightExchange(
        "folder", Drafter(), load, (), Engine(), Servicer(), DraftInstruments(registry)
    ), registry


async def test_what_is_taken_up_is_told():
    """Version and size change; name, incarnation and role of the replica stay."""
    found = replace(INFO, version="new", incarnation="i9", context_length=600, shadow=False)
    one, registry = exchange(lambda: ("fresh", found))
    await one.take_up()
    assert one.drafter.given == "fresh"
    assert one.servicer.info == replace(INFO, version="new", context_length=600)
    assert registry.get_sample_value("outrider_draft_weights", {"version": "new"}) == 1


def _fail() -> tuple[Any, ModelInfo]:
    raise ModelError("model: broken")


def _break() -> tuple[Any, ModelInfo]:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    "load",
    [
        _fail,
        _break,
        lambda: ("fresh", replace(INFO, vocabulary_hash="w", version="new")),
        lambda: ("fresh", replace(INFO, context_length=100, version="new")),
        lambda: ("fresh", replace(INFO, kind="eagle", version="new")),
    ],
    ids=["no model", "no memory", "another vocabulary", "a shorter context", "a head in place of a model"],
)
async def test_what_cannot_be_used_is_refused_and_counted(load):
    """The old weights go on."""
    one, registry = exchange(load)
    await one.take_up()
    assert one.drafter.given is None
    assert one.servicer.info == INFO
    refused = registry.get_sample_value("outrider_draft_files_refused_total", {"files": "draft_weights"})
    assert refused == 1


async def test_the_same_weights_are_not_exchanged():
    """Such as after a copy of the files."""
    one, _ = exchange(lambda: ("fresh", INFO))
    await one.take_up()
    assert one.drafter.given is None
