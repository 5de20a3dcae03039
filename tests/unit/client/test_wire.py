"""What the client sends, and what it refuses to."""

from __future__ import annotations

import pytest

from outrider.client.blocking import Client
from outrider.protocol.errors import InvalidRequest


def test_a_wrong_mode_is_named() -> None:
    """With those that there are, and not by a name of the protocol."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate("x", mode="fast")
    assert str(failure.value) == "speculation.mode: must be one of auto, sequential, off, not 'fast'"
