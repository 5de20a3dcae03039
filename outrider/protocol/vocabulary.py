"""Checks that token ids from the wire belong to a vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from outrider.protocol.errors import InvalidRequest


def check_vocabulary(field: str, tokens: Collection[int], size: int) -> None:
    """Check that all tokens, or keys of a map, are below the vocabulary's size.

    Raises:
        InvalidRequest: one is not; names the place of the first such.
    """
    if tokens and max(tokens) >= size:
        index, token = next((index, token) for index, token in enumerate(tokens) if token >= size)
        place = token if isinstance(tokens, Mapping) else index
        raise InvalidRequest(f"{field}[{place}]", f"token {token} is outside the vocabulary of {size}")
