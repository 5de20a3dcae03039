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


@pytest.mark.parametrize("name", ["stop", "choice"])
def test_one_text_is_no_list_of_texts(name: str) -> None:
    """Its characters would be stop strings, each of which ends the text."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as failure:
        client.generate("x", **{name: "END"})  # type: ignore[arg-type]
    assert str(failure.value) == f"sampling.{name}: must be a list, such as ['END']"
