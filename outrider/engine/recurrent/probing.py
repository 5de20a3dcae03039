"""Finds out about a recurrent module by inspecting and running it.

Shapes: B sequences, n tokens of each, C width of the model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from outrider.engine.kv.kept_states import joined, tensors_of

_CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # `cache` since transformers 5.24


def recurrent_modules(network: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that keep states in transformers' cache: all begin with a convolution."""
    return [module for module in network.modules() if _is_recurrent(module)]


def _is_recurrent(module: nn.Module) -> bool:
    return _convolution(module) is not None and hasattr(module, "layer_idx") and bool(_cache_name(module))


def _convolution(module: nn.Module) -> nn.Conv1d | None:
    return next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)


def _cache_name(module: nn.Module) -> str | None:
    """Return the name of the argument in which a module takes the cache."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class, even if the module's forward was replaced."""
    return partial(type(module).forward, module)


class StatefulModule:
    """A recurrent module [B, n, C] -> [B, n, C] that goes on from given states."""

    def __init__(self, module: Any, cache: DynamicCache, width: int) -> None:
        self._forward = forward_of(module)
        self._index: int = module.layer_idx
        self._name = str(_cache_name(module))
        self._layer = cache.layers[self._index]
        self._cache = copy.copy(cache)
        # OLMo Hybrid asks the last recurrent layer whether there is a state (transformers 5.17).
        self._cache.layers = cache.layers[: self._index + 1]
        self.fresh: Any = vars(self._layer)
        """The state at the beginning of a text."""
        self.factor: float = getattr(module, "ssm_in_multiplier", 1.0)
        """The factor of its input before its linear layers."""
        convolution = _convolution(module)
        assert convolution is not None, "a recurrent module"
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randn(1, 3, width, generator=generator).to(convolution.weight)
        self.example = self.enter([self.fresh])
        """An example of a state."""
        with torch.inference_mode():
            self(self._tokens[:, :1])

    def enter(self, states: Sequence[Any]) -> Any:
        """Join copies of states, one of each sequence, to the current state, which calls change; return
        it."""
        layer = copy.copy(self._layer)
        vars(layer).update(joined(states))
        self._cache.layers[self._index] = layer
        return vars(layer)

    def __call__(self, hidden: Tensor) -> Any:
        """Return the module's result for tokens [B, n, C] after the current state."""
        return self._forward(hidden, **{self._name: self._cache})

    def reads_all_of_a_state(self) -> bool:
        """True if the module reads all of a state when it computes several tokens. Those of Jamba and
        Zamba do so only for one token."""
        others = [self.example, *(joined([self.example]) for _ in tensors_of(self.example))]
        for index, other in enumerate(others[1:]):
            list(tensors_of(other))[index].add_(1.0)
        first, *rest = [self._ends(other) for other in others]
        return not any(all(map(torch.equal, first, end)) for end in rest)

    def _ends(self, state: Any) -> list[Tensor]:
        """Return the result for two tokens after a state, and the state after them."""
        with torch.inference_mode():
            entered = self.enter([state])
            return [self(self._tokens[:, 1:]), *tensors_of(entered)]

    def linear_ends(self, module: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
        """Return the linear layers that read a module's input (times the factor), and the one that makes its
        output."""
        calls: dict[nn.Module, tuple[Any, Any]] = {}

        def note(linear: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            calls[linear] = given[0] if given else None, made

        linears = [child for child in module.modules() if hasattr(child, "out_features")]
        hooks = [linear.register_forward_hook(note) for linear in linears]
        with torch.inference_mode():
            self.enter([self.fresh])
            result = self(self._tokens)
        for hook in hooks:
            hook.remove()
        read = self._tokens * self.factor
        readers = [
            linear for linear, (given, _) in calls.items() if given is self._tokens or _equal(given, read)
        ]
        return readers, next((linear for linear, (_, made) in calls.items() if made is result), None)


def _equal(given: Any, read: Tensor) -> bool:
    return isinstance(given, Tensor) and torch.equal(given, read)
