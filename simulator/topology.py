"""What is simulated: which replicas, how far apart, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.protocol.messages import Mode


class ArmKind(StrEnum):
    """What is compared."""

    AUTO = "auto"
    """Draft and target on devices of their own, both at work at once."""
    SEQUENTIAL = "sequential"
    """The same devices, one after the other."""
    OFF = "off"
    """The target alone."""
    LOCKSTEP = "lockstep"
    """An engine with both models on one device that drafts a chain for the whole batch, then verifies it."""

    @property
    def mode(self) -> Mode:
        """The mode that requests ask for."""
        return {"auto": Mode.AUTO, "off": Mode.OFF}.get(self.value, Mode.SEQUENTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What is there."""

    arm: ArmKind = ArmKind.AUTO
    verify_replicas: int = 1
    draft_replicas: int = 1
    """Of AUTO and SEQUENTIAL, perhaps none; OFF has none, LOCKSTEP one with every verify replica."""
    orchestrators: int = 1
    rtt: float = 0.0
    """Seconds between the orchestrator and a replica, there and back."""
    max_sessions: int = 64
    """That one replica holds."""

    @property
    def drafts(self) -> int:
        """Draft replicas that run."""
        if self.arm is ArmKind.OFF:
            return 0
        return self.verify_replicas if self.arm is ArmKind.LOCKSTEP else self.draft_replicas

    def devices(self, target_devices: int) -> int:
        """Accelerators in use when a verify replica has `target_devices`."""
        own = 0 if self.arm is ArmKind.LOCKSTEP else self.drafts
        return self.verify_replicas * target_devices + own


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for: `sessions` at once, each `rounds` requests one after the other."""

    sessions: int = 1
    rounds: int = 1
    prompt_tokens: int = 32
    """0: the recorded texts from their beginning, one after the other."""
    new_tokens: int = 128
    warm_up: int = 0
    """Requests one after the other before anything counts, as a service that has run for a while has seen."""
    warm_rounds: int = 0
    """Requests of every session after that, all sessions at once, which do not count either."""
    temperature: float = 0.0
    seed: int = 0
