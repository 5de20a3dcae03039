"""Loads an EAGLE-3 head and prepares its products for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.engine.cpu.backend import AUTO
from outrider.engine.cpu.choice import choose_backend
from outrider.engine.cpu.linear import pack_linears
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.eagle.checkpoint import read_head
from outrider.engine.eagle.head import GATE, EagleHead
from outrider.engine.linears import linear_weight, linears_of
from outrider.engine.loading.model_config import find_device


def load_head(
    model: str,
    target: str,
    *,
    dtype: str,
    device: str,
    threads: int,
    helper_cores: Sequence[int] = (),
    cpu_backend: str = AUTO,
    progress: Callable[[str], None] = lambda _: None,
) -> EagleHead:
    """Return the head in the folder or hub id `model`, for the target in `target`. Other arguments are those
    of `load_model`.

    Raises:
        ModelError: it is no head for this target; the text names the setting or the tensor.
    """
    torch.set_num_threads(threads)
    config, tensors = read_head(model, target)
    chosen = tensors["fc.weight"].dtype if dtype == "auto" else getattr(torch, dtype)
    head = EagleHead(config, tensors, chosen, find_device(device)).eval()
    if head.device.type == "cpu":
        weights = [linear_weight(module) for module in linears_of(head).values()]
        choice = choose_backend(weights, cpu_backend)
        count = pack_linears(head, choice.backend, WorkerPool(threads, helper_cores), (GATE,))
        progress(f"{count} linear layers on {choice.backend}: {choice.reason}")
    return head
