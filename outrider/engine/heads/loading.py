"""Loads a draft head and prepares its products for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from transformers.utils import logging as transformers_logging

from outrider.engine.cpu.backend import AUTO
from outrider.engine.cpu.choice import choose_backend
from outrider.engine.cpu.linear import pack_linears
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.heads.base import Head
from outrider.engine.heads.eagle_checkpoint import read_head
from outrider.engine.heads.eagle_head import GATE, EagleHead
from outrider.engine.heads.mtp_loading import read_mtp
from outrider.engine.linears import linear_weight, linears_of
from outrider.engine.loading.model_config import LOAD_ERRORS, find_device, unreadable, usable
from outrider.engine.threads import leave_cores_to, set_threads


def load_head(
    model: str,
    target: str,
    *,
    kind: Literal["eagle", "mtp"] = "eagle",
    dtype: str,
    device: str,
    threads: int,
    helper_cores: Sequence[int] = (),
    cpu_backend: str = AUTO,
    say: Callable[[str], None] = lambda _: None,
) -> Head:
    """Return the EAGLE-3 head in the folder or hub id `model`, for the target in `target`;
    or the MTP layer of the target `model`. Other arguments are those of `load_model`.

    Raises:
        ModelError: it is no head for this target; the text names the setting or the tensor.
    """
    place = usable(find_device(device))
    threads = set_threads(threads, place)
    head = _read(kind, model, target, dtype, place).eval()
    if head.device.type == "cpu":
        weights = [linear_weight(module) for module in linears_of(head).values()]
        choice = choose_backend(weights, cpu_backend)
        leave_cores_to(choice.backend)
        workers = WorkerPool(threads, helper_cores)
        count = pack_linears(head, choice.backend, workers, (GATE,))
        say(f"{count} linear layers on {choice.backend} with {workers}: {choice.reason}")
    return head


def _read(kind: str, model: str, target: str, dtype: str, device: torch.device) -> Head:
    if kind == "mtp":
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        return read_mtp(model, dtype, device)
    try:
        return _read_eagle(model, target, dtype, device)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error


def _read_eagle(model: str, target: str, dtype: str, device: torch.device) -> EagleHead:
    config, tensors = read_head(model, target)
    chosen = tensors["fc.weight"].dtype if dtype == "auto" else getattr(torch, dtype)
    return EagleHead(config, tensors, chosen, device)
