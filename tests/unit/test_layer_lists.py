"""Lists of layers in text."""

from __future__ import annotations

import pytest

from outrider.layer_lists import parse_layers, spell_layers


def test_lists_of_layers() -> None:
    """Single ones and ranges, there and back."""
    assert parse_layers("2,5-7") == {2, 5, 6, 7}
    assert parse_layers("") == frozenset()
    assert spell_layers({7, 2, 5, 6}) == "2,5-7"
    assert spell_layers(()) == ""


@pytest.mark.parametrize("text", ["x", "3-", "-3", "5-2", "1 2", "0-99999999999"])
def test_what_is_no_list_is_refused(text: str) -> None:
    """With what a list looks like; a range is not written out before its end is known to be sound."""
    with pytest.raises(ValueError, match="must be a list of layers such as 4-9"):
        parse_layers(text)
