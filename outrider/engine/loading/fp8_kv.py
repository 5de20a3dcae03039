"""The setting `kv_dtype`: where keys and values can be kept in 8 bits, and what a model computes with
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.protocol.errors import ModelError

FP8 = "fp8"
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def check_kv_dtype(kv_dtype: str, device: torch.device) -> None:
    """Refuse a device without kernels before weights are read.

    Raises:
        ModelError: the device is a CPU.
    """
    if kv_dtype == FP8 and device.type == "cpu":
        raise no_fp8("this is the CPU")


def no_fp8(reason: object) -> ModelError:
    """Return the error for a device on which the kernels do not run."""
    return ModelError(f"kv_dtype: fp8 takes kernels of GPUs, which do not run here ({reason}); leave it out")


def rounded(x: Tensor) -> Tensor:
    """Return the nearest e4m3 numbers, at most 448, in the dtype of x."""
    return x.float().clamp(-LARGEST, LARGEST).to(E4M3).to(x.dtype)


class RoundedCache(DynamicCache):
    """A transformers cache of rounded keys and values. Attention sees only these, even for its own step."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers: takes what a layer computed, returns what it attends to."""
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)
