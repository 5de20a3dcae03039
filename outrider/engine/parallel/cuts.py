"""Which part of each weight a rank holds, and the configuration of a model that has only these parts.

    queries, keys, values, gate, up    rows: some heads, some columns of the MLP
    attention's output, down           columns: what belongs to these rows; the ranks' products are added
    embedding, output layer            rows: some of the vocabulary
    everything else                    whole

(Shoeybi et al. 2019, "Megatron-LM".) Where there are more ranks than kv heads, several ranks hold the same
one. Shapes: C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PretrainedConfig

from outrider.engine.fused_decoder import NotFused
from outrider.protocol.errors import ModelError

Span: TypeAlias = tuple[int, int]
"""Rows or columns [first, end)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is divided between the ranks."""

    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Sizes:
        """The sizes of a model.

        Raises:
            NotFused: its config.json does not say them.
        """
        text = config.get_text_config()
        try:
            heads, width = text.num_attention_heads, text.intermediate_size
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
        except AttributeError as error:
            raise NotFused(f"in its config.json, {error}") from error
        except RuntimeError as error:  # a size that transformers has for each layer
            raise NotFused("its layers differ in their heads") from error
        return cls(heads, kv_heads, head_dim, width, text.vocab_size)

    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide these sizes.

        Raises:
            ModelError: it does not; says which.
        """
        few, many = sorted((self.kv_heads, ranks))
        for size, name, even in (
            (self.query_heads, "query heads", self.query_heads % ranks == 0),
            (self.kv_heads, "kv heads", many % few == 0),
            (self.mlp_width, "columns of the MLP", self.mlp_width % ranks == 0),
        ):
            if not even:
                raise ModelError(
                    f"tensor_parallel: {ranks} ranks cannot share the {size} {name} of the model evenly; "
                    "set another number"
                )


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a weight: `spans` of one axis, one after the other, then zeros up to `size`."""

    axis: int
    spans: tuple[Span, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of one rank."""

    sizes: Sizes
    rank: int
    ranks: int

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """What this rank has of a weight, by its name in the checkpoint and its shape; None: all of it."""
        module, _, kind = name.rpartition(".")
        match module.rpartition(".")[2], kind:
            case "q_proj", _:
                return self._rows(self._queries())
            case (("k_proj" | "v_proj"), _):
                return self._rows(self._keys())
            case "qkv_proj", _:
                return self._rows(*self._queries_keys_values())
            case (("gate_proj" | "up_proj"), _):
                return self._rows(self._even(self.sizes.mlp_width))
            case "gate_up_proj", _:
                width = self.sizes.mlp_width
                return self._rows(self._even(width), self._even(width, width))
            case "o_proj", "weight":
                return self._columns(self._queries())
            case "down_proj", "weight":
                return self._columns(self._even(self.sizes.mlp_width))
            case (("o_proj" | "down_proj"), _):  # biases are added once
                return None if self.rank == 0 else Cut(0, (), shape[0])
            case (("embed_tokens" | "lm_head"), _):
                return self._words()
            case _:
                return None

    @property
    def words(self) -> int:
        """Rows of the vocabulary that each rank has, the last ones perhaps zeros."""
        return -(-self.sizes.vocabulary // self.ranks)

    def _rows(self, *spans: Span) -> Cut:
        return Cut(0, spans, sum(end - first for first, end in spans))

    def _columns(self, span: Span) -> Cut:
        return Cut(1, (span,), span[1] - span[0])

    def _even(self, size: int, first: int = 0) -> Span:
        share = size // self.ranks
        return first + self.rank * share, first + (self.rank + 1) * share

    def _queries(self) -> Span:
        return self._even(self.sizes.query_heads * self.sizes.head_dim)

    def _keys(self, first: int = 0) -> Span:
        heads, width = self.sizes.kv_heads, self.sizes.head_dim
        head, count = self.rank * heads // self.ranks, kv_heads_of(self.sizes, self.ranks)
        return first + head * width, first + (head + count) * width

    def _queries_keys_values(self) -> tuple[Span, ...]:
        keys = self.sizes.query_heads * self.sizes.head_dim
        values = keys + self.sizes.kv_heads * self.sizes.head_dim
        return self._queries(), self._keys(keys), self._keys(values)

    def _words(self) -> Cut:
        first, last = self.rank * self.words, self.sizes.vocabulary
        return Cut(0, ((min(first, last), min(first + self.words, last)),), self.words)


def kv_heads_of(sizes: Sizes, ranks: int) -> int:
    """Kv heads of one rank."""
    return max(1, sizes.kv_heads // ranks)


def narrow(config: PretrainedConfig, sizes: Sizes, ranks: int) -> PretrainedConfig:
    """The configuration of a model that has one rank's part of the weights."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    text.head_dim = sizes.head_dim
    text.num_attention_heads = sizes.query_heads // ranks
    text.num_key_value_heads = kv_heads_of(sizes, ranks)
    text.intermediate_size = sizes.mlp_width // ranks
    text.vocab_size = -(-sizes.vocabulary // ranks)
    text.pad_token_id = None  # may be beyond this vocabulary
    return made


def small(config: PretrainedConfig, sizes: Sizes, ranks: int) -> PretrainedConfig:
    """The configuration of a small model of the same kind, with the same heads, for the check at load.

    It has a layer of each kind, and a vocabulary that the ranks do not share evenly.
    """
    made = copy.deepcopy(config)
    text = made.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = list(dict.fromkeys(kinds)) if kinds else None
    if layers is not None:
        layers = layers * 2 if len(layers) == 1 else layers
        text.layer_types = layers
    text.num_hidden_layers = 2 if layers is None else len(layers)
    text.head_dim = sizes.head_dim
    text.hidden_size = 64
    text.intermediate_size = 32 * ranks
    text.vocab_size = 64 * ranks - 1
    text.pad_token_id = None
    return made
