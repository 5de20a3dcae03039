"""What is simulated: the replicas, their distance, and the load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.protocol.messages import Mode


class ArmKind(StrEnum):
    """The ways to run a pair that are compared."""

    AUTO = "auto"
    """Draft and target on devices of their own, which work at the same time."""
    SEQUENTIAL = "sequential"
    """Draft and target on devices of their own, which work one after the other."""
    OFF = "off"
    """Only the target."""
    LOCKSTEP = "lockstep"
    """An engine with both models on one device that drafts a chain for the whole batch, then verifies it."""

    @property
    def mode(self) -> Mode:
        """The mode that requests ask for."""
        return {"auto": Mode.AUTO, "off": Mode.OFF}.get(self.value, Mode.SEQUENTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The replicas and their distance."""

    arm: ArmKind = ArmKind.AUTO
    verify_replicas: int = 1
    draft_replicas: int = 1
    """Number for AUTO and SEQUENTIAL, at least 0. OFF has none, LOCKSTEP one with every verify replica."""
    orchestrators: int = 1
    rtt: float = 0.0
    """Round trip between the orchestrator and a replica, in seconds."""
    max_sessions: int = 64
    """Most sessions of one replica."""

    @property
    def drafts(self) -> int:
        """Number of draft replicas that run."""
        if self.arm is ArmKind.OFF:
            return 0
        return self.verify_replicas if self.arm is ArmKind.LOCKSTEP else self.draft_replicas

    def devices(self, target_devices: int) -> int:
        """Number of accelerators in use when a verify replica has `target_devices`."""
        own = 0 if self.arm is ArmKind.LOCKSTEP else self.drafts
        return self.verify_replicas * target_devices + own


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests: `sessions` sessions at once, each with `rounds` requests one after the other."""

    sessions: int = 1
    rounds: int = 1
    prompt_tokens: int = 32
    """Length of prompts. With 0, the recorded texts are used from their beginning, one after the other."""
    new_tokens: int = 128
    warm_up: int = 0
    """Number of requests, one after the other, before anything counts, so that services are warm."""
    warm_rounds: int = 0
    """Requests of every session after these, with all sessions at once, which do not count either."""
    temperature: float = 0.0
    seed: int = 0
