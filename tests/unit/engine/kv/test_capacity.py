"""How many tokens the KV memory holds."""

from __future__ import annotations

import pytest

from outrider.engine.kv.capacity import DEFAULT_TOKENS, kv_capacity
from outrider.protocol.errors import ModelError

TOKEN_BYTES = 128 * 1024


def test_what_is_asked_for_is_made() -> None:
    """Whether it is more than what is taken unasked or less, up to all that is free."""
    assert kv_capacity(100, TOKEN_BYTES, 100 * TOKEN_BYTES) == 100
    assert kv_capacity(10**6, TOKEN_BYTES, 10**6 * TOKEN_BYTES) == 10**6


def test_more_than_is_free_is_refused() -> None:
    """The sentence names the setting and the most that fits."""
    with pytest.raises(ModelError, match=r"kv_tokens: 101 tokens take .* set at most 100, or free memory"):
        kv_capacity(101, TOKEN_BYTES, 100 * TOKEN_BYTES)
    with pytest.raises(ModelError, match="kv_tokens: 1 tokens take"):
        kv_capacity(0, TOKEN_BYTES, TOKEN_BYTES)


def test_a_large_model_gets_less_than_a_small_one_unasked() -> None:
    """Half of the free memory, so that a draft can start beside it."""
    assert kv_capacity(0, 1, 10**9) == DEFAULT_TOKENS
    assert kv_capacity(0, TOKEN_BYTES, 1000 * TOKEN_BYTES) == 500


def test_nothing_is_known_of_the_memory() -> None:
    """A system that does not tell how much is free refuses nothing."""
    assert kv_capacity(0, TOKEN_BYTES, 0) == DEFAULT_TOKENS
    assert kv_capacity(10**9, TOKEN_BYTES, 0) == 10**9
