"""Where ranks find each other: a file for ranks of one machine, a port of rank 0 for ranks of several."""

from __future__ import annotations

import os
import platform
import sys
from datetime import timedelta

import torch
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from outrider.engine.loading.model_config import find_device, usable
from outrider.engine.parallel.order import Order, split_address
from outrider.engine.parallel.ranks import MAX_LOAD_SECONDS
from outrider.protocol.errors import LostRank, ModelError

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Gloo's variable for the network interface that it listens on."""


def open_store(order: Order) -> Store:
    """Return the store in which the ranks meet.

    Raises:
        LostRank: rank 0 does not answer at its address, or its port is taken.
    """
    if not order.config.tensor_parallel_address:
        os.environ.setdefault(INTERFACE, "lo" if sys.platform == "linux" else "lo0")
        return FileStore(order.meeting, order.config.tensor_parallel)
    host, port = split_address(order.meeting)
    wait = timedelta(seconds=MAX_LOAD_SECONDS)
    try:
        return TCPStore(host, port, is_master=order.rank == 0, timeout=wait, wait_for_workers=False)
    except RuntimeError as error:
        raise LostRank(f"tensor_parallel_address: {order.meeting} cannot be used ({error})") from error


def board_of(order: Order, device: torch.device) -> str:
    """Return the file of the memory that ranks share; empty if they are on GPUs or on several machines, or
    the processor may reorder stores. Only Linux can reserve a file's room."""
    together = device.type == "cpu" and not order.config.tensor_parallel_address
    ordered = (sys.platform, platform.machine()) == ("linux", "x86_64")
    return os.path.join(os.path.dirname(order.meeting), "board") if together and ordered else ""


def device_of(order: Order) -> torch.device:
    """Return the device of a rank: if all ranks are on one machine, the GPU with the rank's number.

    Raises:
        ModelError: there is no such device.
    """
    place = find_device(order.config.device)
    if place.type != "cuda" or order.config.tensor_parallel_address:
        return usable(place)
    found = torch.cuda.device_count()
    if found < order.config.tensor_parallel:
        raise ModelError(
            f"tensor_parallel: {order.config.tensor_parallel} ranks need as many CUDA devices, and {found} "
            "were found; set device to cpu or tensor_parallel lower"
        )
    return usable(torch.device("cuda", order.rank))
