"""The sizes of a model, and the bytes that follow from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8 = "fp8"
CODED = {"int8": 8.5, "int4": 4.5, FP8: 8.25}
"""Bits per number of a linear layer that is stored as codes, its share of a scale included."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one model, in the arithmetic that it will run in."""

    name: str
    dtype: str
    parameters: int
    looked_up: int
    """Parameters of a table of input embeddings that is not the output layer too: no step reads all of it."""
    kv_numbers: int
    """Numbers of the keys and values of one token in all layers, or of the latents that they are made of."""
    context_length: int
    vocabulary_size: int
    linear: int = 0
    """Parameters of linear layers that may be stored as codes, without the output layer and experts."""
    experts: int = 0
    """Parameters of experts."""
    active: float = 1.0
    """Share of the experts' parameters that one token goes through."""
    coded_experts: int = 0
    """Parameters of experts that may be stored as codes; on a GPU they have 16 bits instead."""
    head: int = 0
    """Parameters of the output layer."""
    tied: bool = False
    """Whether the output layer is the table of input embeddings; as codes it is a second copy of it."""
    weights: str = "full"
    """int8 or int4 if linear layers are rounded, fp8 if the checkpoint stores them so."""
    kv_dtype: str = "auto"
    """fp8 if keys and values are stored in fp8."""
    whole_kv_numbers: int = 0
    """Numbers of whole keys and values, which GPUs keep, if `kv_numbers` are those of latents."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._bytes(self.parameters + (self._coded_head if self.tied else 0), 1.0)

    def step_bytes(self, tokens: int) -> int:
        """Bytes of weights that a step over `tokens` reads; several tokens may need every expert."""
        share = self.active if tokens == 1 else 1.0
        resting = round(self.experts * (1.0 - share))
        return self._bytes(self.parameters - self.looked_up - resting, share)

    def _bytes(self, numbers: int, share: float) -> int:
        """Bytes of some of the parameters, among which are this share of the experts'."""
        if self.weights not in CODED:
            return numbers * BYTES[self.dtype]
        inside, head = self.linear + round(self.coded_experts * share), self._coded_head
        codes = int(inside * CODED[self.weights] + head * CODED["int8"]) // 8
        return (numbers - inside - head) * BYTES[self.dtype] + codes

    @property
    def _coded_head(self) -> int:
        """Parameters of the output layer that are codes, of at least 8 bits; checkpoints in fp8 have none."""
        return self.head if self.weights in CODED and self.weights != FP8 else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.kv_numbers * (1 if self.kv_dtype == FP8 else BYTES[self.dtype])
