"""A predicted text: where the text is in it, and what it says next."""

from __future__ import annotations

import random

import pytest

from outrider.speculation.lookup import Proposed
from outrider.speculation.prediction import Prediction

FILE = list(range(100, 160))


def best(prediction: Prediction, count: int = 4) -> list[int]:
    """The tokens of the best guess."""
    return [place.token for place in prediction.propose(3 * count) if place.rank == 0][:count]


def said(prediction: Prediction) -> set[int]:
    """The tokens that any guess proposes first."""
    return {place.token for place in prediction.propose(12) if place.parent < 0}


def test_begins_at_its_beginning() -> None:
    """Before a token is generated, the answer is the prediction itself."""
    assert best(Prediction(FILE)) == FILE[:4]
    assert Prediction(()).propose(8) == []


def test_follows_what_comes_true() -> None:
    """The tokens after those that were generated."""
    prediction = Prediction(FILE)
    prediction.append(FILE[:7])
    assert prediction.propose(2) == [Proposed(-1, 107, 7, 0), Proposed(0, 108, 8, 0)]


EDITS = {
    "a replaced token": ([7], 21),
    "three replaced tokens": ([7, 8, 9], 23),
    "an inserted token": ([7], 20),
    "an inserted passage": (list(range(10, 30)), 20),
    "a token that stands elsewhere": ([150], 21),
}
"""What is written after 20 tokens of the file, and the token of the file that follows it."""


@pytest.mark.parametrize("edit", EDITS)
def test_goes_on_right_after_an_edit(edit: str) -> None:
    """The first token after the edit is proposed, and the next ones are the best guess."""
    written, after = EDITS[edit]
    prediction = Prediction(FILE, [*FILE[:20], *written])
    assert FILE[after] in said(prediction)
    prediction.append(FILE[after : after + 2])
    assert best(prediction) == FILE[after + 2 : after + 6]


def test_a_copied_passage_is_left_again() -> None:
    """One token after it tells where the text goes on."""
    prediction = Prediction(FILE, [*FILE[:20], *FILE[40:45], FILE[20]])
    assert best(prediction) == FILE[21:25]


def test_a_deleted_passage_is_skipped() -> None:
    """One token after it is enough, however far away it is."""
    prediction = Prediction(FILE, [*FILE[:20], FILE[50]])
    assert best(prediction) == FILE[51:55]


def test_repeated_passages_are_followed_in_their_order() -> None:
    """A text that repeats itself is not taken for its first passage again."""
    passage = [1, 2, 3, 4]
    repeated = [*passage, 50, *passage, 60, *passage, 70]
    prediction = Prediction(repeated, [*passage, 50, *passage])
    assert best(prediction, 1) == [60]
    prediction = Prediction(repeated, [*passage, 99, *passage])  # 50 was replaced
    assert best(prediction, 1) == [60]


def test_the_nearest_match_ahead_is_preferred() -> None:
    """Of equal matches, what was written already is less likely than what is still to come."""
    text = [1, 9, 2, 3, 4, 5, 6, 9, 7, 8, 9, 11]
    assert best(Prediction(text, [1, 9, 2, 3, 9]), 1) == [7]


def test_what_was_skipped_may_come_later() -> None:
    """A moved passage is found behind the present place too."""
    moved = [*FILE[:10], *FILE[30:], *FILE[10:13]]
    assert best(Prediction(FILE, moved)) == FILE[13:17]


def test_another_text_gets_guesses_that_no_match_supports() -> None:
    """They are told by a match length of 0."""
    prediction = Prediction(FILE, range(5))
    assert {place.match_length for place in prediction.propose(9) if place.parent < 0} == {0}


def test_pieces_are_the_same_as_the_whole() -> None:
    """A replica that is given all tokens at once is where one is that got them step by step."""
    source = random.Random(3)
    predicted = [source.randrange(9) for _ in range(200)]
    text = [token if source.random() > 0.2 else source.randrange(9) for token in predicted]
    piecewise = Prediction(predicted)
    for start in range(0, 200, 7):
        piecewise.append(text[start : start + 7])
        assert piecewise.propose(24) == Prediction(predicted, text[: start + 7]).propose(24)


def test_bounds_hold_and_parents_come_first() -> None:
    """Never more nodes than asked for, a token once below a parent, and nothing below what is refused."""
    source = random.Random(4)
    predicted = [source.randrange(4) for _ in range(300)]
    prediction = Prediction(predicted, [source.randrange(4) for _ in range(100)])
    for most in (0, 1, 5, 30):
        found = prediction.propose(most)
        assert len(found) <= most
        assert all(place.parent < index for index, place in enumerate(found))
        assert len({(place.parent, place.token) for place in found}) == len(found)
    assert prediction.propose(30, keep=lambda parent, length, rank: False) == []


def test_most_of_an_edited_file_is_foreseen() -> None:
    """With an edit every thirty tokens, nine in ten of the other tokens are a guess's next one."""
    source = random.Random(5)
    predicted = [source.randrange(500) for _ in range(1200)]
    text: list[int] = []
    for index, token in enumerate(predicted):
        match (index % 30, source.randrange(3)):
            case (0, 0):
                text += [source.randrange(500), token]
            case (0, 1):
                text.append(source.randrange(500))
            case (0, 2):
                pass
            case _:
                text.append(token)
    prediction, foreseen = Prediction(predicted), 0
    for token in text:
        foreseen += token in said(prediction)
        prediction.append([token])
    assert foreseen > 0.9 * len(text)
