"""What a verify replica says that it serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.config import VerifyConfig
from outrider.engine.kv.pages import PagePool
from verify_service.replica import LoadedTarget, describe

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
