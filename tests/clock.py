"""A clock that tests move."""


class Clock:
    """Time as a test sets it."""

    now = 100.0

    def __call__(self) -> float:
        """Now."""
        return self.now
