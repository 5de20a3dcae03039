"""The dict with a bound."""

from __future__ import annotations

from outrider.recent import Recent


def test_the_entry_unused_longest_is_dropped() -> None:
    """Both setting and using an entry count as a use."""
    dropped: list[str] = []
    recent = Recent[str, int](2, dropped.append)
    recent["a"], recent["b"] = 1, 2
    assert recent.use("a", lambda: 5) == 1
    recent["c"] = 3
    recent["a"] = 4
    assert recent.use("d", lambda: 6) == 6
    assert dict(recent) == {"a": 4, "d": 6}
    assert dropped == ["b", "c"]
