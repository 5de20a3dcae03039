"""A dict with a bound, for what may be forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """A dict of at most `limit` entries: beyond that, the one set or used longest ago is dropped."""

    def __init__(self, limit: int, dropped: Callable[[Key], None] = lambda key: None) -> None:
        """`dropped` is called with the key of an entry that had to go."""
        super().__init__()
        self._limit = limit
        self._dropped = dropped

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self._dropped(self.popitem(last=False)[0])

    def use(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; `make` makes that of a new one."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
        return self[key]
