"""Memory and bandwidth of devices, as their makers state them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outrider.protocol.errors import ConfigError

GB = 10**9
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    name: str
    memory: int
    """In bytes."""
    bandwidth: float
    """Bytes per second; 0: unknown."""
    product: str = ""
    """The label `nvidia.com/gpu.product` of its nodes; empty: no GPU, or a slice of one."""


def _gpu(name: str, memory: int, bandwidth: int, product: str) -> Device:
    return Device(name, memory * GB, bandwidth * float(GB), product)


GPUS = {
    one.name: one
    for one in (
        _gpu("a10", 24, 600, "NVIDIA-A10"),
        _gpu("a100-40gb", 40, 1555, "NVIDIA-A100-SXM4-40GB"),
        _gpu("a100-80gb", 80, 2039, "NVIDIA-A100-SXM4-80GB"),
        _gpu("b200", 180, 8000, "NVIDIA-B200"),
        _gpu("h100", 80, 3350, "NVIDIA-H100-80GB-HBM3"),
        _gpu("h100-nvl", 94, 3900, "NVIDIA-H100-NVL"),
        _gpu("h100-pcie", 80, 2000, "NVIDIA-H100-PCIe"),
        _gpu("h200", 141, 4800, "NVIDIA-H200"),
        _gpu("l4", 24, 300, "NVIDIA-L4"),
        _gpu("l40s", 48, 864, "NVIDIA-L40S"),
        _gpu("rtx-3090", 24, 936, "NVIDIA-GeForce-RTX-3090"),
        _gpu("rtx-4090", 24, 1008, "NVIDIA-GeForce-RTX-4090"),
        _gpu("rtx-5090", 32, 1792, "NVIDIA-GeForce-RTX-5090"),
    )
}
"""Memory in GB and bandwidth in GB/s (powers of ten) from NVIDIA's data sheets, for the SXM modules unless
the name says otherwise. The labels are the driver's names of the devices."""


def device_of(name: str, memory_gb: float | None, bandwidth_gbs: float | None) -> Device:
    """A device by its name; given figures replace the table's.

    Raises:
        ConfigError: there is no such device in the table, and no figures of its own were given.
    """
    known = _named(name.lower())
    if known is None and (memory_gb is None or bandwidth_gbs is None):
        names = ", ".join((*GPUS, CPU))
        raise ConfigError(
            f"--gpu: {name!r} is not known; use one of {names}, or give --memory and --bandwidth"
        )
    device = known or Device(name, 0, 0.0)
    return Device(
        device.name,
        device.memory if memory_gb is None else round(memory_gb * GB),
        device.bandwidth if bandwidth_gbs is None else bandwidth_gbs * GB,
        device.product,
    )


def _named(name: str) -> Device | None:
    if name == CPU:
        return Device(CPU, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0.0)
    return GPUS.get(name)
