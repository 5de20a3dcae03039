"""What a simulation is fed with: how long work takes on a machine, and the recorded texts of a pair."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.engine.cpu.worker_pool import HELPED_ROWS
from outrider.protocol.errors import ConfigError

FOLDER = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Field(ge=0)]
Points = tuple[tuple[int, Seconds], ...]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HostTimes(_Frozen):
    """Processor time of what is not a forward."""

    send: Seconds = Field(description="Sending a message: conversion, gRPC, system calls.")
    receive: Seconds = Field(description="Receiving one.")
    rewarm: Seconds = Field(0.0, description="What the first message after a pause takes longer.")
    wake: Seconds = Field(description="From a message at hand to the engine thread that sleeps.")
    verify_step: Seconds = Field(0.0, description="A target step beside the forward, whatever its sessions.")
    verify_session: Seconds = Field(description="One session's part of a target step beside the forward.")
    draft_step: Seconds = Field(description="A draft step beside the forward.")
    draft_verdict: Seconds = Field(description="A verdict in the draft's engine.")


class Profile(_Frozen):
    """Times of one machine and pair."""

    name: str
    origin: Literal["measured", "modelled"]
    """Measured on the machine, or computed from data sheets."""
    note: str
    traces: str
    """File beside the profiles with the pair's texts."""
    cores: Literal["two", "own"]
    """two: of a machine with two cores one is the target's, one the draft's and the orchestrator's, clients
    use both; own: every engine has an accelerator, every process a core."""
    target_forward: Points
    """T(n) by tokens, as measured or modelled; straight between the points."""
    target_context: Seconds = 0.0
    """What one session's context adds to a target forward."""
    target_sampling: Seconds = 0.0
    """What sampling adds to a target step at temperatures above 0."""
    target_helped: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With two cores: part of T(n) - T(1) that the draft's core helps with, from HELPED_ROWS tokens on; T(1)
    is the time in which the weights come from the memory, which two cores cannot do faster."""
    target_quiet: Points = ()
    """With two cores: T(n) while no draft works, when the draft's core helps with every step; empty: with
    long ones alone."""
    draft_kind: Literal["model", "lookup"] = "model"
    draft_forward: Points
    draft_context: Seconds = 0.0
    draft_sampling: Seconds = 0.0
    target_devices: int = 1
    """Accelerators of one verify replica."""
    host: HostTimes
    context_length: int = 2048

    @classmethod
    def read(cls, path: Path) -> Profile:
        """A profile from a file.

        Raises:
            ConfigError: there is no such file.
        """
        if not path.exists():
            there = ", ".join(sorted(known.stem for known in FOLDER.glob("*.json")))
            raise ConfigError(f"profile: there is no {path}; the package has {there}")
        return cls.model_validate(json.loads(path.read_text()))

    def target_times(self, temperature: float) -> TargetTimes:
        """Times of the target at a temperature."""
        sampling = self.target_sampling if temperature else 0.0
        forward = _seconds(self.target_forward, self.target_context, sampling)
        least = self.target_forward[0][1]
        quiet = _seconds(self.target_quiet, self.target_context, sampling) if self.target_quiet else None
        return TargetTimes(
            forward, self.host.verify_step, self.host.verify_session, least, self.target_helped, quiet
        )

    def draft_times(self, temperature: float) -> DraftTimes:
        """Times of the draft at a temperature."""
        sampling = self.draft_sampling if temperature else 0.0
        forward = _seconds(self.draft_forward, self.draft_context, sampling)
        return DraftTimes(forward, self.host.draft_step, self.host.draft_verdict)


Forward = Callable[[int, int], float]
"""Seconds of a forward by its tokens and sessions."""


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """How long a target step takes: on the device, and on the host beside it, for itself and per session."""

    forward: Forward
    step: float
    session: float
    least: float
    """T(1)."""
    share: float
    """Of what a long step takes beyond that: a second core takes parts of it."""
    quiet: Forward | None = None
    """The forward while a second core has nothing else to do; None: like any other."""

    def helped(self, tokens: int, sessions: int, seconds: float, drafting: bool) -> float:
        """How much of a step a second core takes parts of, `drafting` while drafts work there."""
        if self.quiet is not None and not drafting:
            return min(max(2.0 * (seconds - self.quiet(tokens, sessions)), 0.0), seconds)
        return self.share * max(seconds - self.least, 0.0) if tokens >= HELPED_ROWS else 0.0


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """How long a draft step takes on the device, and what the host adds per step and per verdict."""

    forward: Forward
    step: float
    verdict: float


def interpolate(points: Points, tokens: int) -> float:
    """Seconds of `tokens` tokens: straight between the points, and on as between the last two."""
    counts = [count for count, _ in points]
    above = min(max(bisect_left(counts, tokens), 1), len(counts) - 1)
    (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
    share = max((tokens - low) / (high - low), 0.0)
    return low_seconds + share * (high_seconds - low_seconds)


def _seconds(points: Points, context: float, sampling: float) -> Forward:
    return lambda tokens, sessions: interpolate(points, tokens) + context * sessions + sampling
