"""States of recurrent layers at the end of published pages, which a sequence needs to go on from there.

A state is large, so few are kept: the least recently used are dropped. States are nested dicts with tensors,
as `outrider.engine.recurrent` makes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 2**30
"""Most bytes of all kept states."""


class KeptStates:
    """States by the hash of all tokens before them. Belongs to the engine thread, as the pool does."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._states: OrderedDict[bytes, Any] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def keep(self, key: bytes, states: Any) -> None:
        """Keep a copy, unless there is one already or it is larger than all together may be."""
        size = size_of(states)
        if key in self._states or size > self._max_bytes:
            return
        self._states[key] = copied(states)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= size_of(self._states.popitem(last=False)[1])

    def forget(self, key: bytes) -> None:
        """Drop the states with this key, if there are any."""
        if key in self._states:
            self._bytes -= size_of(self._states.pop(key))

    def find(self, key: bytes) -> Any:
        """Return the states after these tokens, which must be here."""
        self._states.move_to_end(key)
        return self._states[key]


def mapped(states: Sequence[Any], of: Callable[[list[Tensor]], Tensor]) -> Any:
    """Merge states of one shape into one: `of` makes its tensors from theirs. Everything else comes from the
    first."""
    first = states[0]
    if isinstance(first, Tensor) and first.ndim:
        return of(list(states))
    if isinstance(first, dict):
        return {name: mapped([state[name] for state in states], of) for name in first}
    return first


def joined(states: Sequence[Any]) -> Any:
    """Return the states of several sequences as those of a batch, copied."""
    return mapped(states, torch.cat)


def copied(states: Any) -> Any:
    """Return a copy of the states."""
    return mapped([states], lambda tensors: tensors[0].clone())


def part(states: Any, index: int) -> Any:
    """Return the states of one sequence of a batch, which share the batch's memory."""
    return mapped([states], lambda tensors: tensors[0][index : index + 1])


def tensors_of(states: Any) -> Iterator[Tensor]:
    """All tensors of states."""
    if isinstance(states, Tensor):
        yield states
    elif isinstance(states, dict):
        for each in states.values():
            yield from tensors_of(each)


def size_of(states: Any) -> int:
    """Bytes of states."""
    return sum(tensor.nbytes for tensor in tensors_of(states))
