"""Token ids of a request that are no token ids of the model, and drafts whose tokens are not the target's."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.vocabulary import check_vocabulary, vocabulary_mismatch


def test_the_first_token_outside_is_named_with_its_place() -> None:
    """In a list by its index, in a map by its key; nothing is said of what fits."""
    check_vocabulary("token_ids", (), 10)
    check_vocabulary("token_ids", (0, 9), 10)
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: token 10 is outside the vocabulary of 10"):
        check_vocabulary("token_ids", (9, 10, 11), 10)
    with pytest.raises(InvalidRequest, match=r"logit_bias\[12\]: token 12"):
        check_vocabulary("logit_bias", {3: 1.0, 12: 1.0}, 10)


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ("tokens:a", "tokens:a", ""),
        ("size:8", "size:8", ""),
        ("tokens:a", "tokens:b", "the vocabulary of 'D' is not that of 'T'; use a draft with"),
        ("size:8", "size:9", "the vocabulary of 'D' is not that of 'T'; use a draft with"),
        (
            "size:8",
            "tokens:a",
            "'T' came without a tokenizer, by which pairs are compared; put one into its folder",
        ),
        ("tokens:a", "size:8", "'D' came without a tokenizer"),
    ],
)
def test_a_pair_that_does_not_fit_says_which_model_to_change(target: str, draft: str, reason: str) -> None:
    """A model without a tokenizer is named as the one that lacks it, be it the target or the draft."""
    found = vocabulary_mismatch(("T", target), ("D", draft))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
