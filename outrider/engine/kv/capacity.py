"""How many tokens the KV memory holds. Pure."""

from __future__ import annotations

from outrider.protocol.errors import ModelError

PAGE_SIZE = 16
"""Tokens of a page."""
DEFAULT_TOKENS = 65536
"""Tokens of the KV memory unless the settings say otherwise: 64 sessions of a thousand tokens."""
FREE_SHARE = 0.5
"""Largest share of the free memory that is taken by default: a draft may start on the same device."""


def kv_capacity(wanted: int, token_bytes: int, free: int) -> int:
    """Return the number of tokens to allocate, of `token_bytes` each, where `free` bytes are unused; `free`
    0: unknown.

    `wanted` 0 means `DEFAULT_TOKENS`, or as many as `FREE_SHARE` of the free memory holds if that is less.

    Raises:
        ModelError: the wanted tokens do not fit, or not even one does.
    """
    if not free:
        return wanted or DEFAULT_TOKENS
    fitting = min(DEFAULT_TOKENS, int(free * FREE_SHARE) // token_bytes)
    if free < wanted * token_bytes or not (wanted or fitting):
        raise ModelError(
            f"kv_tokens: {wanted or 1} tokens take {(wanted or 1) * token_bytes / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free; set at most {free // token_bytes}, or free memory"
        )
    return wanted or fitting
