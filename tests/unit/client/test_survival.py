"""What a request asks for once its stream has broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.client.request import Request
from outrider.client.results import Chunk, Started
from outrider.client.retries import Attempts, Retries
from outrider.client.survival import Survivor
from outrider.protocol.errors import ModelGone, Unavailable

STARTED = Started(
    index=0, request_id="r", seed=7, model="m", prompt_tokens=3, cached_tokens=0, model_version="v"
)


def _survivor(**options: int) -> Survivor:
    return Survivor(
        Request(prompt="x", **options),  # type: ignore[arg-type]
        Attempts(Retries(), lambda: 0.0),
        lambda broken: None,
    )


def test_the_rest_is_asked_of_the_same_weights() -> None:
    """Each continuation names those that it began with; one that has not begun, those of another."""
    survivor = _survivor(n=3)
    survivor.take(STARTED)
    survivor.take(replace(STARTED, index=1, model_version="w"))
    survivor.take(Chunk(index=0, text="a", token_ids=(1,)))
    named = []
    for part in survivor._parts:
        rest = survivor.next_request()
        assert rest is not None
        named.append(rest.model_version)
        part.ended = True
    assert named == ["v", "w", "v"]


def test_a_text_is_not_continued_by_other_weights() -> None:
    """An orchestrator that has others refuses the rest: the reader hears so at once, and has no mixture."""
    survivor = _survivor()
    survivor.take(STARTED)
    survivor.take(Chunk(index=0, text="a", token_ids=(1,)))
    survivor.broke(Unavailable("gone"), 60.0)
    with pytest.raises(Unavailable, match="after 1 token and cannot be resumed: other weights"):
        survivor.broke(ModelGone("other weights"), 60.0)
