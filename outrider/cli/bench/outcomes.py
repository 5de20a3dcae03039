"""The outcome of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from outrider.cli.bench.target import Ended
from outrider.protocol.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One finished request. Times are in seconds by one clock; figures that it does not have are None."""

    index: int
    sent: float
    ended: float
    due: float | None = None
    """When it should have been sent, of a load with arrivals."""
    deliveries: tuple[float, ...] = ()
    """When tokens came."""
    end: Ended | None = None
    """The server's counts; None: it failed."""
    error: OutriderError | None = None

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return self.deliveries[0] - self.sent if self.deliveries else None

    @property
    def gaps(self) -> list[float]:
        """Times between deliveries, of one or several tokens each."""
        return [later - earlier for earlier, later in pairwise(self.deliveries)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.end is None or not self.deliveries or self.end.output_tokens < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.end.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """From sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def late(self) -> float | None:
        """How long after it was due it was sent."""
        return None if self.due is None else self.sent - self.due
