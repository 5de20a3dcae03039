"""How far chains are right."""

from __future__ import annotations

import pytest

from outrider.cli.advise.chains import acceptance, lookup_runs, runs


def test_a_chain_is_right_up_to_its_first_wrong_token() -> None:
    """From every position on."""
    assert runs([True, True, False, True]) == (2, 1, 0, 1)
    assert runs([]) == ()


def test_a_lookup_s_chain_is_what_followed_before() -> None:
    """Nothing at first; then the text repeats itself, up to its end."""
    assert lookup_runs((1, 2, 3, 4, 5), (9, 1, 2, 3, 4, 7)) == (0, 0, 0, 2, 1, 0)


def test_shares_fall_with_the_length_of_the_chain() -> None:
    """Chains that would go on behind the end of the text do not count."""
    assert acceptance([(2, 1, 0, 1), (0, 3, 2, 1)]) == pytest.approx([6 / 8, 3 / 6, 1 / 4, 0.0])


def test_short_texts_say_nothing_of_long_chains() -> None:
    """A share of no chains is not given."""
    assert acceptance([(1,), ()]) == [1.0]
    assert acceptance([]) == []
