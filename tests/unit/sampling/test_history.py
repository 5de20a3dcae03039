"""What penalties know of the tokens before a row."""

from __future__ import annotations

from outrider.sampling.history import History, Path


def counted(history: History | Path) -> dict[int, float]:
    """Output count of every distinct token, path included."""
    tokens, counts = history.counts()
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True)) | dict(history.changes())


def test_prompt_tokens_are_known_but_not_counted() -> None:
    """Repetition looks at prompt and output, frequency and presence at the output alone."""
    assert counted(History([5, 6, 5], [6, 7])) == {5: 0.0, 6: 1.0, 7: 1.0}


def test_appended_tokens_count_once_each() -> None:
    """Commits add up, whenever the counts are asked for."""
    history = History([1], [2])
    history.append([2, 3])
    assert counted(history) == {1: 0.0, 2: 2.0, 3: 1.0}
    history.append([3])
    assert counted(history) == {1: 0.0, 2: 2.0, 3: 2.0}


def test_a_path_changes_its_own_counts_only() -> None:
    """Siblings and the base do not see a node's path."""
    history = History([1, 2], [2])
    left, right = history.extended([2, 9, 9]), history.extended([1])
    assert counted(left) == {1: 0.0, 2: 2.0, 9: 2.0}
    assert counted(right) == {1: 1.0, 2: 1.0}
    assert counted(history) == {1: 0.0, 2: 1.0}


def test_many_distinct_tokens_fit() -> None:
    """The tables grow."""
    history = History(range(1000))
    history.append(list(range(500, 3000)))
    assert len(counted(history)) == 3000
    assert sum(counted(history).values()) == 2500
