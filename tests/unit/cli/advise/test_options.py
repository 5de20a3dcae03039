"""The drafts that are compared, and the command that uses one."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from outrider.cli.advise.options import WITHOUT, DraftOption, Room, command, draft_options
from outrider.cli.settings import resolve
from outrider.cli.up.plan import UpConfig, plan_replicas
from outrider.cores import Cores
from outrider.protocol.errors import ConfigError

ROOM = Room(8, 100)


def asked(*drafts: str, skips: Any = (), weights: str = "full") -> argparse.Namespace:
    """The flags."""
    return argparse.Namespace(
        target="T", draft=list(drafts), draft_skip_layers=list(skips), draft_weights=weights
    )


def test_each_draft_counts_once_and_none_is_no_draft() -> None:
    """Whatever it is named for: it is compared anyway."""
    assert [option.name for option in draft_options(asked("A", "lookup", "none", "A"))] == ["A", "lookup"]


def test_the_target_is_a_draft_for_every_list_of_layers() -> None:
    """Other drafts keep their layers; lookup has no weights."""
    options = draft_options(asked("T", "A", "lookup", skips=["1", "1-2"], weights="int8"))
    assert [option.name for option in options] == [
        "T without 1, int8",
        "T without 1-2, int8",
        "A, int8",
        "lookup",
    ]


def test_layers_of_what_is_no_draft_are_refused() -> None:
    """With what to add."""
    with pytest.raises(ConfigError, match="add --draft T"):
        draft_options(asked("A", skips=["1"]))


def test_nothing_to_compare_is_refused() -> None:
    """None alone is no question."""
    with pytest.raises(ConfigError, match="--draft"):
        draft_options(asked("none"))


@pytest.mark.parametrize(
    "option", [WITHOUT, DraftOption("lookup"), DraftOption("A"), DraftOption("T", "1-2", "int8")]
)
def test_up_understands_the_command(option: DraftOption) -> None:
    """It starts the draft that was measured."""
    words = command("T", option, "bfloat16", ROOM).split()
    assert words[:2] == ["outrider", "up"]
    pairs = dict(zip(words[2::2], words[3::2], strict=True))
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs.items()}
    given["draft"] = [given["draft"]]
    resolved = resolve("up", UpConfig, argparse.Namespace(config="", **given), {})
    replicas = plan_replicas(resolved, Cores((0, 1), 2), gpu=False)
    drafts = [spec.arguments for spec in replicas if spec.service == "draft"]
    assert len(drafts) == (option != WITHOUT)
    for arguments in drafts:
        assert ("--skip-layers" in arguments) == bool(option.skip_layers)
        assert ("lookup" in arguments) == (option.draft == "lookup")


def test_names_with_blanks_are_quoted() -> None:
    """The line can be pasted."""
    assert "--draft 'my draft'" in command("T", DraftOption("my draft"), "auto", ROOM)


def test_more_sessions_than_the_services_take_need_settings() -> None:
    """As environment variables before the command; none where the defaults do."""
    assert Room(64, 100).settings == []
    assert Room(128, 100).settings == ["OUTRIDER_VERIFY_MAX_SESSIONS=128", "OUTRIDER_DRAFT_MAX_SESSIONS=128"]
    assert "OUTRIDER_VERIFY_KV_TOKENS=131072" in Room(128, 992).settings
    assert command("T", WITHOUT, "auto", Room(128, 9)).startswith("OUTRIDER_VERIFY_MAX_SESSIONS=128 ")
