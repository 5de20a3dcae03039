"""Decides what to do when a child process is ready or exits. Pure: the clock is an argument.

A child that exits before all children were ready once points to a mistake in the settings: stop all and say
why. After that, a crash is a fault to recover from: restart, with growing pauses while it keeps crashing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""Seconds for which a child must have been ready for its next crash to count as the first."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after a pause."""

    pause_seconds: float


class GiveUp:
    """Stop all children and exit with an error."""


@dataclass(slots=True)
class _Child:
    crashes: int = 0
    ready_at: float | None = None


@dataclass(slots=True)
class Supervisor:
    """Decides about the children of one `outrider up`."""

    names: tuple[str, ...]
    stopping: bool = False
    up: bool = False
    """Whether all children have been ready at the same time at least once."""
    _children: dict[str, _Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._children = {name: _Child() for name in self.names}

    def ready(self, name: str, now: float) -> None:
        """A child said that it is ready."""
        self._children[name].ready_at = now
        self.up = self.up or all(child.ready_at is not None for child in self._children.values())

    def exited(self, name: str, now: float) -> Restart | GiveUp | None:
        """A child's process has ended; what to do. None: it was expected."""
        child = self._children[name]
        ready_at, child.ready_at = child.ready_at, None
        if self.stopping:
            return None
        if not self.up:
            return GiveUp()
        if ready_at is not None and now - ready_at >= STEADY_SECONDS:
            child.crashes = 0
        child.crashes += 1
        pause = FIRST_PAUSE_SECONDS * 2.0 ** min(child.crashes - 1, 10)
        return Restart(min(pause, MAX_PAUSE_SECONDS))

    def stop(self) -> None:
        """Exits are expected from now on."""
        self.stopping = True
