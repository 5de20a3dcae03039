"""Messages from the event loop to an engine thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """One queue for all sessions; the engine thread sleeps here when it has nothing to do.

    Whoever puts a message has seen that there is room: `len` is how many wait.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = threading.Condition()
        self._woken = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Append a message and wake the engine."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def wake(self) -> None:
        """Make the engine look around though there is no message."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, wait: float | None) -> list[Message]:
        """All messages; without any, waits up to `wait` seconds (None: for ever) for one or a `wake`."""
        with self._changed:
            if not self._messages and not self._woken and wait != 0.0:
                self._changed.wait(wait)
            self._woken = False
            messages, self._messages = self._messages, []
            return messages
