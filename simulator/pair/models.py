"""The models of a pair, loaded as the services load them, each with one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment

CHUNK = 256
"""Number of tokens of a prompt that are computed at once."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model and its arithmetic, by the names of a service's settings."""

    model: str
    dtype: str = "auto"
    skipped_layers: frozenset[int] = frozenset()
    weights: str = "full"

    def load(self, kv_tokens: int, helper_cores: Sequence[int] = ()) -> ModelRunner:
        """Load the model, with memory for `kv_tokens` tokens.

        Raises:
            ModelError: it cannot be loaded.
        """
        loaded = load_model(
            self.model,
            dtype=self.dtype,
            device="cpu",
            threads=1,
            helper_cores=helper_cores,
            skipped_layers=self.skipped_layers,
            weights=self.weights,
        )
        return ModelRunner(loaded, -(-kv_tokens // PAGE_SIZE), PAGE_SIZE)


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of the weights in memory; a weight that two layers share counts once."""
    packed, plain = 0, dict[int, int]()
    for module in runner.loaded.model.modules():
        packed += module.nbytes if isinstance(module, CpuLinear) else 0
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            plain[tensor.data_ptr()] = tensor.nbytes
    return packed + sum(plain.values())


def read(runner: ModelRunner, kv: SequenceKv, tokens: Sequence[int]) -> None:
    """Compute and keep tokens without using their logits."""
    for start in range(0, len(tokens), CHUNK):
        piece = tokens[start : start + CHUNK]
        runner.forward([Segment(kv, piece, None, ())])
        runner.commit(kv, range(len(piece)), piece)
