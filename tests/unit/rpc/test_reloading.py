"""Values made of files: taken up when they change, kept while what is there cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from outrider.protocol.errors import ConfigError
from outrider.rpc.reloading import SETTLE_SECONDS, Contents, Reloaded
from tests.certificates import mount
from tests.clock import Clock


def number(contents: Contents) -> int:
    """What the file holds, if that is a number."""
    try:
        return int(contents["number"])
    except ValueError:
        raise ConfigError("number: is none") from None


@pytest.fixture
def clock() -> Clock:
    """The time of a test."""
    return Clock()


def test_new_contents_are_taken_up(tmp_path: Path, clock: Clock) -> None:
    """By a write, by a rename, and not before the period is over; the same contents are no change."""
    file = tmp_path / "number"
    file.write_text("1")
    reloaded = Reloaded("test", {"number": str(file)}, number, period=5.0, clock=clock)
    file.write_text("2")
    assert reloaded.current() == 1
    clock.now += 5.0
    assert reloaded.current() == reloaded.value == 2
    (tmp_path / "new").write_text("3")
    (tmp_path / "new").rename(file)
    clock.now += 5.0
    with capture_logs() as lines:
        assert [reloaded.current(), reloaded.current()] == [3, 3]
        clock.now += 5.0
        file.write_text("3")
        assert reloaded.current() == 3
    assert [line["event"] for line in lines] == ["new files taken up"]


def test_a_swapped_link_is_a_change(tmp_path: Path, clock: Clock) -> None:
    """A Secret that Kubernetes mounts is renewed by swapping the link ..data."""
    folder = mount(tmp_path / "secret", {"number": b"1"})
    reloaded = Reloaded("test", {"number": str(folder / "number")}, number, clock=clock)
    mount(folder, {"number": b"2"})
    assert reloaded.current() == 2


def test_unusable_contents_are_refused_once(tmp_path: Path, clock: Clock) -> None:
    """The old value stays; one log line and one count for each wrong content that is still there a second
    later, and none for what is over by then."""
    file, refused = tmp_path / "number", []
    file.write_text("1")
    reloaded = Reloaded("test", {"number": str(file)}, number, clock=clock)
    reloaded.on_refused = refused.append
    with capture_logs() as lines:
        file.unlink()
        assert reloaded.current() == 1
        file.write_text("two")
        for _ in range(4):
            assert reloaded.current() == 1
            clock.now += SETTLE_SECONDS / 2
        assert refused == ["test"]
        file.write_text("three")
        assert reloaded.current() == 1
        clock.now += SETTLE_SECONDS
        assert reloaded.current() == 1
        file.unlink()
        assert reloaded.current() == 1
        clock.now += SETTLE_SECONDS
        assert reloaded.current() == 1
        assert refused == ["test"] * 3
        file.write_text("4")
        assert reloaded.current() == 4
    assert [line["log_level"] for line in lines] == ["error", "error", "error", "info"]
    assert "two" not in str(lines)


def test_files_that_change_meanwhile_are_read_again(tmp_path: Path) -> None:
    """A pair is never put together of an old and a new file."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("old")
    b.write_text("old")
    seen: list[Contents] = []

    def make(contents: Contents) -> Contents:
        if not seen:
            a.write_text("new")
            b.write_text("new")
        seen.append(contents)
        return contents

    assert Reloaded("test", {"a": str(a), "b": str(b)}, make).value == {"a": b"new", "b": b"new"}
    assert len(seen) == 2


def test_a_value_is_needed_to_begin_with(tmp_path: Path) -> None:
    """A missing or unusable file stops the process at start."""
    with pytest.raises(ConfigError, match="number: cannot read"):
        Reloaded("test", {"number": str(tmp_path / "number")}, number)
    (tmp_path / "number").write_text("x")
    with pytest.raises(ConfigError, match="number: is none"):
        Reloaded("test", {"number": str(tmp_path / "number")}, number)
