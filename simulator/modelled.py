"""Profiles of machines that were not measured, computed from data sheets: bytes over bandwidth, or FLOPs.

    forward   max(weight bytes / bandwidth, 2 x parameters x tokens / FLOPs) + fixed time
    context   bytes of one session's keys and values / bandwidth

The host's times were measured with the services on a processor core; they are used for every accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.profile import FOLDER, Points, Profile

POINTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
CONTEXT_TOKENS = 1024
"""Number of a session's tokens whose keys and values a step reads."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder in bfloat16 that is spread over `devices` accelerators."""

    parameters: float
    context_bytes: float
    """Bytes of the keys and values of one token."""
    fixed: float
    """Seconds of a step besides weights and arithmetic: launches, reductions between devices, sampling."""
    devices: int = 1


BANDWIDTH, FLOPS = 0.8 * 3.35e12, 0.5 * 989e12
"""Bytes and operations per second of an H100: 80 % and 50 % of the data sheet's figures."""
LLAMA_1B = Model(parameters=1.24e9, context_bytes=32_768, fixed=0.1e-3)
LLAMA_8B = Model(parameters=8.03e9, context_bytes=131_072, fixed=0.2e-3)
LLAMA_70B = Model(parameters=70.6e9, context_bytes=327_680, fixed=2.4e-3, devices=4)
"""On four devices. `fixed` is two reductions in each of 80 layers, at 15 microseconds each."""
PAIRS = {"h100-8b-1b": (LLAMA_8B, LLAMA_1B), "h100-70b-1b": (LLAMA_70B, LLAMA_1B)}


def modelled(name: str) -> Profile:
    """The profile of one of `PAIRS`, with texts and host times of the measured pair.

    Raises:
        KeyError: no pair has that name.
    """
    target, draft = PAIRS[name]
    measured = Profile.read(FOLDER / "widened.json")
    return Profile(
        name=name,
        origin="modelled",
        note=f"H100: {target.parameters / 1e9:g} B target on {target.devices}, "
        f"{draft.parameters / 1e9:g} B draft; texts and host times of the pair {measured.name!r}.",
        traces=measured.traces,
        cores="own",
        target_forward=_forward(target),
        target_context=_context(target),
        draft_forward=_forward(draft),
        draft_context=_context(draft),
        target_devices=target.devices,
        host=measured.host,
    )


def _forward(model: Model) -> Points:
    weights = 2.0 * model.parameters / BANDWIDTH / model.devices
    token = 2.0 * model.parameters / FLOPS / model.devices
    return tuple((count, max(weights, token * count) + model.fixed) for count in POINTS)


def _context(model: Model) -> float:
    return CONTEXT_TOKENS * model.context_bytes / BANDWIDTH / model.devices
