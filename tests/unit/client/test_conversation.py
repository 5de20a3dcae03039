"""Conversations as callers write them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.client.conversation import message_of
from outrider.protocol.errors import InvalidRequest


@pytest.mark.parametrize("content", [{"type": "text", "text": "hi"}, [{"type": "image"}], [5], 5])
def test_content_is_text_or_parts_of_text(content: Any) -> None:
    """Anything else is refused: the names of a part's members are no text."""
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]\.content: must be a text, or parts of text"):
        message_of("prompt[0]", {"role": "user", "content": content})
