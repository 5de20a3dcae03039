"""The outcome of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from outrider.cli.bench.target import Ended
from outrider.protocol.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One finished request. Times are in seconds of one clock; figures that are missing are None."""

    index: int
    sent: float
    ended: float
    due: float | None = None
    """When the request should have been sent; None in a load without arrival times."""
    deliveries: tuple[float, ...] = ()
    """Times at which tokens arrived."""
    end: Ended | None = None
    """The server's counts; None if the request failed."""
    error: OutriderError | None = None

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return self.deliveries[0] - self.sent if self.deliveries else None

    @property
    def gaps(self) -> list[float]:
        """Times between deliveries; each delivery brings one or several tokens."""
        return [later - earlier for earlier, later in pairwise(self.deliveries)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.end is None or not self.deliveries or self.end.output_tokens < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.end.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.ended - self.sent

    @property
    def late(self) -> float | None:
        """Time from when the request was due until it was sent."""
        return None if self.due is None else self.sent - self.due
