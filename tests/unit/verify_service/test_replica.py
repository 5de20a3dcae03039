"""What a verify replica says that it serves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from structlog.testing import capture_logs

from outrider.config import VerifyConfig
from outrider.engine.kv.pages import PagePool
from outrider.engine.loading.tokenizer_files import TokenizerFiles
from outrider.protocol.errors import InternalError
from verify_service.replica import LoadedTarget, VerifyReplica, describe, find_tokenizer, version_of

MODEL = SimpleNamespace(
    name="target",
    vocabulary_size=300,
    context_length=2048,
    eos_token_ids=(1,),
    bos_token_id=0,
    dtype_name="float32",
    device="cpu",
    arithmetic="",
    choice=None,
    hidden_size=64,
    num_layers=3,
    fingerprint="",
)


@pytest.mark.parametrize(("pages", "longest"), [(44, 704), (128, 2048), (4096, 2048)])
def test_no_sequence_may_be_longer_than_the_memory_for_it(pages: int, longest: int) -> None:
    """Requests beyond it are refused at once, rather than cut off after they have filled it."""
    runner = SimpleNamespace(loaded=MODEL, pool=PagePool(pages, 16), page_memory=lambda: None)
    target = LoadedTarget(cast(Any, runner), None, None, cast(Any, None), 512)
    assert describe(VerifyConfig(), target, "replica").context_length == longest


@pytest.mark.parametrize(("failure", "ended"), [(None, "closed"), (InternalError("no memory"), "left")])
def test_ranks_are_left_after_a_failure(failure: InternalError | None, ended: str) -> None:
    """They may wait for this rank's part of a step, for a minute; otherwise they are told of the end."""
    ends: list[str] = []
    engine = MagicMock(failure=failure, stop=AsyncMock())
    runner, group = MagicMock(), MagicMock()
    runner.close.side_effect = lambda: ends.append("closed")
    group.leave.side_effect = lambda: ends.append("left")
    asyncio.run(VerifyReplica(engine, runner, group).close())
    assert ends == [ended]


@pytest.mark.parametrize(("failure", "running"), [(None, 3), (InternalError("no memory"), 1)])
def test_a_failed_replica_waits_for_no_transfer(failure: InternalError | None, running: int) -> None:
    """Its engine, which would note the end of one, has ended."""
    engine = MagicMock(failure=failure, sessions=1, moving=2)
    assert VerifyReplica(engine, MagicMock()).running() == running


def test_a_target_without_a_tokenizer_is_warned_of(tmp_path: Path) -> None:
    """At the start: requests with texts are refused only later, one by one."""
    (tmp_path / "config.json").write_text("{}")
    with capture_logs() as lines:
        assert find_tokenizer(str(tmp_path)) is None
    assert [(line["log_level"], "token ids" in line["event"]) for line in lines] == [("warning", True)]


def test_another_tokenizer_or_chat_template_is_another_version() -> None:
    """An orchestrator takes up a new chat template as it does new weights, and resumes no text with it."""
    files = TokenizerFiles(b"{}", "{{ messages }}", {"eos_token": "</s>", "bos_token": "<s>"})
    same = replace(files, special_tokens=dict(reversed(files.special_tokens.items())))
    others = [
        replace(files, tokenizer_json=b"{ }"),
        replace(files, chat_template=""),
        replace(files, special_tokens={}),
        replace(files, tool_chat_template="{{ tools }}"),
        None,
    ]
    assert version_of("a", files) == version_of("a", same)
    versions = {version_of("a", files), version_of("b", files), *(version_of("a", other) for other in others)}
    assert len(versions) == 2 + len(others)
    assert version_of("", files) == ""
