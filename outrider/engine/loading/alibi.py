"""ALiBi: biases of attention that grow with the distance of a key.

With ALiBi a score has slope · position of the key added to it, with a slope for each head. (Press, Smith and
Lewis 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation".) A key
carries this bias in two more columns: the product of query and key then includes it, and the attention needs
no support for it.

Shapes: N packed tokens, one batch; Q query heads, D width of keys.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_FACTOR = 64.0
"""The value of a query's two columns. With it float16 holds the keys' columns for 65536 positions."""


def uses_alibi(network: PreTrainedModel) -> bool:
    """True if the keys of this model carry their positions."""
    return network.config.model_type in ("bloom", "mpt") or bool(getattr(network.config, "alibi", False))


class Alibi:
    """The biases that the keys of a forward carry, noted before it begins.

    The slopes, and where products are rounded to the model's dtype, are those of transformers.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        config, modeling = network.config, sys.modules[type(network).__module__]
        self._is_mpt, self._is_falcon = config.model_type == "mpt", config.model_type == "falcon"
        heads, device = config.num_attention_heads, network.device
        self._dtype = network.dtype
        self._width = config.hidden_size // heads
        if self._is_mpt:  # from -1 to 0
            slopes = -modeling.build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]
        else:  # from 0 to 1
            mask = torch.ones((1, 2), dtype=torch.int64, device=device)
            slopes = modeling.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
        self._slopes = slopes.bfloat16() if self._is_falcon else slopes
        self._added = torch.empty(0)
        network.register_forward_pre_hook(self._note, with_kwargs=True)

    def columns(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the query [1, Q, N, D] and the key with two more columns each; two columns hold more digits
        than one."""
        exact = self._added / (scaling * _FACTOR)
        first = exact.to(key.dtype)
        both = torch.stack([first, (exact - first).to(key.dtype)], -1)
        factors = query.new_full((*query.shape[:-1], 2), _FACTOR)
        return torch.cat([query, factors], -1), torch.cat([key, both[None]], -1)

    def _note(self, _: Any, args: Any, options: dict[str, Any]) -> Any:
        """Note the biases [Q, N] float32 of a forward of packed tokens, which passes their positions."""
        if (positions := options.get("position_ids")) is None:
            return None
        added = self._slopes[:, None] * positions
        if not self._is_mpt:
            added = added.to(self._dtype)
        self._added = (added / self._width**0.5 if self._is_falcon else added).float()
        options = {
            name: given for name, given in options.items() if name != "position_ids" or self._is_falcon
        }
        if self._is_mpt:  # it needs a mask, and uses one of four axes unchanged
            options["attention_mask"] = torch.zeros((1, 1, 1, 1), device=positions.device)
        return args, options


def alibi_of(network: Any) -> Alibi | None:
    """Return the ALiBi of a model, or None. Each call returns the same object, because it hooks the model's
    forwards."""
    if uses_alibi(network) and not hasattr(network, "noted_alibi"):
        network.noted_alibi = Alibi(network)
    return getattr(network, "noted_alibi", None)
