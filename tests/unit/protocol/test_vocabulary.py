"""Token ids of a request that are no token ids of the model."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.vocabulary import check_vocabulary


def test_the_first_token_outside_is_named_with_its_place() -> None:
    """In a list by its index, in a map by its key; nothing is said of what fits."""
    check_vocabulary("token_ids", (), 10)
    check_vocabulary("token_ids", (0, 9), 10)
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: token 10 is outside the vocabulary of 10"):
        check_vocabulary("token_ids", (9, 10, 11), 10)
    with pytest.raises(InvalidRequest, match=r"logit_bias\[12\]: token 12"):
        check_vocabulary("logit_bias", {3: 1.0, 12: 1.0}, 10)
