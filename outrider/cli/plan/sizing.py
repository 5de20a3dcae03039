"""How much fits on a device, and the least time that a step can take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.cli.plan.devices import CPU, GB, Device
from outrider.cli.plan.sizes import FP8, ModelSizes
from outrider.config import VerifyConfig
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.protocol.errors import ConfigError

HEADROOM = 0.1
"""Share of a device's memory that is left for activations, graphs and the driver."""
PROCESS_BYTES = 4 * GB
"""Memory of a process without its model, in bytes: Python, torch, tokenizer."""
NODES: int = VerifyConfig.model_fields["max_nodes"].default
"""Most candidates of a session in a step, which need room after its text."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One replica of a model on a device."""

    checkpoint: ModelSizes
    device: Device
    context: int
    """Tokens of a session's prompt and output."""
    kv_tokens: int
    """Tokens whose keys and values fit next to the weights, in whole pages."""
    sessions: int
    """Sessions of the full context that fit at once."""

    @property
    def pages(self) -> int:
        """Number of pages, of `PAGE_SIZE` tokens each."""
        return self.kv_tokens // PAGE_SIZE

    @property
    def host_bytes(self) -> int:
        """Host memory of the process, in bytes: weights pass through it on their way to a GPU."""
        kv = self.kv_tokens * self.checkpoint.kv_bytes_per_token if self.device.name == CPU else 0
        return self.checkpoint.weight_bytes + kv + PROCESS_BYTES

    def step_seconds(self, sessions: int) -> float | None:
        """The least time of a step without candidates: the bytes that it reads divided by the bandwidth.
        None: unknown."""
        if not self.device.bandwidth:
            return None
        kv = sessions * self.context * self.checkpoint.kv_bytes_per_token
        return (self.checkpoint.step_bytes(sessions) + kv) / self.device.bandwidth


def fit(checkpoint: ModelSizes, device: Device, context: int, flags: str = "--") -> Fit:
    """How many sessions of a model fit on a device; `flags` is how the names of the model's flags begin.

    Raises:
        ConfigError: the context is longer than the model's, not one session fits, or the device cannot run
            the model with rounded weights or with 8-bit keys and values.
    """
    if device.name != CPU:
        kept = checkpoint.whole_kv_numbers or checkpoint.kv_numbers
        checkpoint = replace(checkpoint, coded_experts=0, kv_numbers=kept)
        if checkpoint.weights == FP8 and checkpoint.dtype == "float32":
            checkpoint = replace(checkpoint, weights="full")  # a GPU expands fp8 to float32
    if checkpoint.weights != "full" and device.name != CPU and checkpoint.dtype == "float32":
        raise ConfigError(
            f"{flags}weights: {checkpoint.weights} takes 16 bits on a GPU, and {checkpoint.name!r} is "
            "float32; set --dtype bfloat16"
        )
    if checkpoint.kv_dtype != "auto" and (device.name == CPU or checkpoint.dtype == "float32"):
        raise ConfigError(
            f"{flags}kv-dtype: {checkpoint.kv_dtype} takes a GPU and 16 bits, and {checkpoint.name!r} is "
            f"{checkpoint.dtype} on {device.name}; leave it out"
        )
    context = _context(checkpoint, context)
    free = int(device.memory * (1 - HEADROOM)) - checkpoint.weight_bytes
    if device.name == CPU:
        free -= PROCESS_BYTES
    tokens = max(0, free // checkpoint.kv_bytes_per_token) // PAGE_SIZE * PAGE_SIZE
    sessions = tokens // _rounded(context + NODES)
    if not sessions:
        raise ConfigError(_does_not_fit(checkpoint, device, context, flags))
    return Fit(checkpoint, device, context, tokens, sessions)


def replicas_for(one: Fit, sessions: int) -> int:
    """Number of replicas that together have room for `sessions`."""
    return -(-sessions // one.sessions)


def _context(checkpoint: ModelSizes, asked: int) -> int:
    limit = checkpoint.context_length
    if asked > limit > 0:
        raise ConfigError(f"--context: {asked} is more than the {limit} of {checkpoint.name!r}; lower it")
    if not (asked or limit):
        raise ConfigError(f"--context: config.json of {checkpoint.name!r} names none; set one")
    return asked or limit


def _does_not_fit(checkpoint: ModelSizes, device: Device, context: int, flags: str) -> str:
    process = PROCESS_BYTES if device.name == CPU else 0
    if checkpoint.weight_bytes + process > device.memory * (1 - HEADROOM):
        weights, memory = (round(one / GB, 3) for one in (checkpoint.weight_bytes, device.memory))
        beside = f", its process {process / GB:g} GB" if process else ""
        return (
            f"--gpu: the weights of {checkpoint.name!r} take {weights:g} GB in {checkpoint.dtype}{beside}, "
            f"and {device.name} has {memory:g} GB; choose a larger device, or another --dtype or "
            f"{flags}weights"
        )
    return (
        f"--context: not one session of {context} tokens fits beside the weights of {checkpoint.name!r} on "
        f"{device.name}; lower it, or choose a larger device"
    )


def _rounded(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE
