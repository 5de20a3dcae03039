"""Which tokens a draft learns from, and which it is measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.collected import Collected
from outrider.distill.traffic import Window, read_collected, split, up_to, windows_of
from outrider.protocol.errors import ConfigError


def text(prompt: int, length: int, task: str = "code", vocabulary: str = "v", first: int = 0) -> Collected:
    """Tokens that count up."""
    return Collected(vocabulary, task, prompt, tuple(range(first, first + length)))


def test_files_are_read_and_what_is_of_no_use_is_counted(tmp_path: Path) -> None:
    """Other vocabularies and tasks, tokens that one of the two lacks, broken lines; equal ones count once."""
    lines = [
        text(1, 4).line(),
        text(1, 4).line(),
        text(1, 5, task="prose").line(),
        text(1, 4, vocabulary="w").line(),
        text(1, 4, first=97).line(),
    ]
    (tmp_path / "collected-1.jsonl").write_text("".join(lines) + '{"cut')
    (tmp_path / "other.txt").write_text("not ours")
    found = read_collected(str(tmp_path), "v", 100, "code")
    assert (found.kept, found.others, found.broken) == ([text(1, 4)], 3, 1)
    assert len(read_collected(str(tmp_path / "collected-1.jsonl"), "v", 100).kept) == 2


def test_nothing_to_learn_from_is_a_wrong_setting(tmp_path: Path) -> None:
    """It says why."""
    (tmp_path / "collected-1.jsonl").write_text(text(1, 4, vocabulary="w").line())
    with pytest.raises(ConfigError, match="1 continuations are of another vocabulary"):
        read_collected(str(tmp_path), "v", 100)
    with pytest.raises(ConfigError, match="cannot read"):
        read_collected(str(tmp_path / "none.jsonl"), "v", 100)


def test_a_prompt_is_on_one_side() -> None:
    """What is measured was not learned, however often it was asked, and whatever is collected later."""
    found = [Collected("v", "", 2, (index % 50, 1, index)) for index in range(200)]
    learnt, held_out = split(found, 0.3)
    assert len(learnt) + len(held_out) == 200
    assert not {one.tokens[:2] for one in learnt} & {one.tokens[:2] for one in held_out}
    assert 20 < len(held_out) < 100
    more = split([*found, text(3, 9)], 0.3)
    assert set(held_out) <= set(more[1])
    with pytest.raises(ConfigError, match="--held-out"):
        split(found[:1], 0.3)


@pytest.mark.parametrize("prompt", [1, 3, 9, 40])
@pytest.mark.parametrize("length", [41, 64, 77])
def test_every_generated_token_counts_once_with_context_before_it(prompt: int, length: int) -> None:
    """Windows overlap by half a window, where there is so much."""
    windows = windows_of([text(prompt, length)], 16)
    counted = [token for window in windows for token in window.tokens[window.first :]]
    assert counted == list(range(prompt, length))
    assert all(len(window.tokens) <= 16 and window.first >= 1 for window in windows)
    assert all(window.first >= min(8, window.tokens[window.first]) for window in windows)


def test_so_many_tokens_are_measured() -> None:
    """Whole windows, no more than needed."""
    windows = [Window((1, 2, 3, 4), 2, "")] * 10
    assert len(up_to(windows, 5)) == 3
    assert len(up_to(windows, 500)) == 10
