"""The input of a simulation: how long work takes on a machine, and the recorded texts of a pair."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.protocol.errors import ConfigError

FOLDER = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Field(ge=0)]
Points = tuple[tuple[int, Seconds], ...]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HostTimes(_Frozen):
    """Processor time of all work that is not a forward."""

    send: Seconds = Field(description="Sending a message: conversion, gRPC, system calls.")
    receive: Seconds = Field(description="Receiving a message.")
    rewarm: Seconds = Field(0.0, description="Additional time of the first message after a pause.")
    wake: Seconds = Field(description="From a message's arrival to the wake-up of the engine thread.")
    verify_step: Seconds = Field(0.0, description="A target step without its forward, whatever its sessions.")
    verify_session: Seconds = Field(description="One session's part of a target step without the forward.")
    draft_step: Seconds = Field(description="A draft step without its forward.")
    draft_verdict: Seconds = Field(description="A verdict in the draft's engine.")


class Profile(_Frozen):
    """The times of one machine with one pair."""

    name: str
    origin: Literal["measured", "modelled"]
    """Whether the times were measured on the machine or computed from data sheets."""
    note: str
    traces: str
    """File with the pair's texts, in the folder of the profiles."""
    cores: Literal["two", "own"]
    """two: a machine with two cores, one for the target, one for draft and orchestrator, both for clients.
    own: every engine has an accelerator, and every process a core."""
    target_forward: Points
    """T(n) at some numbers of tokens, measured or modelled; linear between them."""
    target_context: Seconds = 0.0
    """Time that one session's context adds to a target forward."""
    target_sampling: Seconds = 0.0
    """Time that sampling adds to a target step at temperatures above 0."""
    target_helped: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With two cores: the part of T(n) - T(1) that the draft's core helps with, from `helped_rows` tokens on.
    T(1) is the time to read the weights from memory, in which two cores are no faster than one."""
    helped_rows: int = 15
    """HELPED_ROWS of the worker pool, as on processors with AVX-512."""
    target_quiet: Points = ()
    """With two cores: T(n) while no draft works and the draft's core helps with every step. Empty: it helps
    only with long steps."""
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
            ConfigError: there is no such file, or it is no profile.
        """
        if not path.exists():
            there = ", ".join(sorted(known.stem for known in FOLDER.glob("*.json")))
            raise ConfigError(f"profile: there is no {path}; the package has {there}")
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as error:
            first = error.errors()[0]
            problem = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise ConfigError(f"profile: {path} is no profile ({problem}); repair it") from error

    def target_times(self, temperature: float) -> TargetTimes:
        """Times of the target at a temperature."""
        sampling = self.target_sampling if temperature else 0.0
        forward = _seconds(self.target_forward, self.target_context, sampling)
        one_token = self.target_forward[0][1]
        quiet = _seconds(self.target_quiet, self.target_context, sampling) if self.target_quiet else None
        host = self.host.verify_step, self.host.verify_session
        return TargetTimes(forward, *host, one_token, self.target_helped, self.helped_rows, quiet)

    def draft_times(self, temperature: float) -> DraftTimes:
        """Times of the draft at a temperature."""
        sampling = self.draft_sampling if temperature else 0.0
        forward = _seconds(self.draft_forward, self.draft_context, sampling)
        return DraftTimes(forward, self.host.draft_step, self.host.draft_verdict)


Forward = Callable[[int, int], float]
"""Seconds of a forward by its tokens and sessions."""


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """How long a target step takes on the device, and on the host per step and per session."""

    forward: Forward
    step: float
    session: float
    one_token: float
    """T(1), the shortest time of a forward."""
    share: float
    """The part of a long step's time beyond `one_token` that a second core helps with."""
    helped_rows: int
    """Tokens of a long step, at least."""
    quiet: Forward | None = None
    """Times of the forward while a second core has nothing else to do; None: as at other times."""

    def helped(self, tokens: int, sessions: int, seconds: float, drafting: bool) -> float:
        """Seconds of a step that are shared with a second core; `drafting`: drafts work on that core."""
        if self.quiet is not None and not drafting:
            return min(max(2.0 * (seconds - self.quiet(tokens, sessions)), 0.0), seconds)
        return self.share * max(seconds - self.one_token, 0.0) if tokens >= self.helped_rows else 0.0


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """How long a draft step takes on the device, and what the host adds per step and per verdict."""

    forward: Forward
    step: float
    verdict: float


def interpolate(points: Points, tokens: int) -> float:
    """Seconds for `tokens` tokens: linear between the points, and beyond the last as between the last two."""
    counts = [count for count, _ in points]
    above = min(max(bisect_left(counts, tokens), 1), len(counts) - 1)
    (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
    share = max((tokens - low) / (high - low), 0.0)
    return low_seconds + share * (high_seconds - low_seconds)


def _seconds(points: Points, context: float, sampling: float) -> Forward:
    return lambda tokens, sessions: interpolate(points, tokens) + context * sessions + sampling
