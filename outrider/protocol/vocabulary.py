"""Checks that token ids belong to a vocabulary, and that a draft has the target's."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from outrider.protocol.errors import InvalidRequest

ONLY_SIZE = "size:"
"""Begins the hash of a vocabulary whose model came without a tokenizer."""


def check_vocabulary(field: str, tokens: Collection[int], size: int) -> None:
    """Check that all tokens, or keys of a map, are below the vocabulary's size.

    Raises:
        InvalidRequest: one is not; names the place of the first such.
    """
    if tokens and max(tokens) >= size:
        index, token = next((index, token) for index, token in enumerate(tokens) if token >= size)
        place = token if isinstance(tokens, Mapping) else index
        raise InvalidRequest(f"{field}[{place}]", f"token {token} is outside the vocabulary of {size}")


def vocabulary_mismatch(target: tuple[str, str], draft: tuple[str, str]) -> str:
    """Why a draft's tokens are not the target's, with what to change; empty if they are. Each is given by its
    name and the hash of its vocabulary."""
    if target[1] == draft[1]:
        return ""
    without = [name for name, digest in (target, draft) if digest.startswith(ONLY_SIZE)]
    if len(without) == 1:
        return (
            f"{without[0]!r} came without a tokenizer, by which pairs are compared; put one into its folder"
        )
    names = f"the vocabulary of {draft[0]!r} is not that of {target[0]!r}"
    return f"{names}; use a draft with the target's tokenizer"
