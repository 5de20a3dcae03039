"""Target and draft as they are trained and measured: transformers' own modules, on one device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.distill.traffic import Window
from outrider.engine.heads.eagle_config import is_head
from outrider.engine.loading.loader import load_network
from outrider.engine.loading.model_config import context_limit
from outrider.engine.loading.tokenizer_files import json_file, load_tokenizer, vocabulary_hash
from outrider.protocol.errors import ConfigError
from outrider.protocol.vocabulary import vocabulary_mismatch

MAX_LOGITS = 2**27
"""Most logits of one forward: 0.5 GiB in float32, of which training holds several copies."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target whose weights do not change, and a draft in float32 whose weights may."""

    target: Any
    draft: Any
    draft_dtype: torch.dtype
    """Dtype in which the draft's files store the weights."""
    vocabulary: str
    """Hash of the vocabulary that both have."""
    size: int
    """Number of tokens that both have; models of one family may pad their output layers differently."""
    tokenizer_json: bytes | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the target ends a text."""
        ids = self.target.generation_config.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def context_length(self) -> int | None:
        """Most tokens that the target takes; None: unknown."""
        return context_limit(self.target.config.get_text_config())

    def logits(self, model: Any, windows: Sequence[Window]) -> Tensor:
        """A model's logits for the counted tokens of all windows, in order: [tokens, size] float32."""
        longest = max(len(window.tokens) for window in windows)
        rows = [[*window.tokens, *[0] * (longest - len(window.tokens))] for window in windows]
        batch = torch.tensor(rows, device=self.target.device)  # causal: padding at the end changes nothing
        said = model(batch, use_cache=False).logits
        parts = [
            said[row, window.first - 1 : len(window.tokens) - 1, : self.size]
            for row, window in enumerate(windows)
        ]
        return torch.cat(parts).float()

    def groups(self, windows: Sequence[Window]) -> Iterator[Sequence[Window]]:
        """Yield the windows in order, in groups as large as memory allows."""
        size = max(self.target.config.get_text_config().vocab_size, self.size)
        group: list[Window] = []
        for window in windows:
            longest = max(len(one.tokens) for one in (*group, window))
            if group and longest * (len(group) + 1) * size > MAX_LOGITS:
                yield group
                group = []
            group.append(window)
        if group:
            yield group


def load_pair(target: str, draft: str, *, dtype: str, device: str, threads: int) -> Pair:
    """Load both; `dtype` is the target's arithmetic: auto is float32 on the CPU, else the checkpoint's own.

    Raises:
        ModelError: one of them cannot be loaded.
        ConfigError: they have different vocabularies, or the draft is an EAGLE head.
    """
    if is_head(json_file(draft, "config.json")):
        raise ConfigError(
            f"--draft: {draft!r} is an EAGLE head; `python -m scripts.train_eagle` trains those"
        )
    files = [load_tokenizer(model) for model in (target, draft)]
    networks: list[Any] = [
        load_network(model, dtype=chosen, device=device, threads=threads)
        for model, chosen in ((target, dtype), (draft, "auto"))
    ]
    sizes = [network.get_output_embeddings().weight.shape[0] for network in networks]
    hashes = [
        vocabulary_hash(file.tokenizer_json if file else None, size)
        for file, size in zip(files, sizes, strict=True)
    ]
    if other := vocabulary_mismatch((target, hashes[0]), (draft, hashes[1])):
        raise ConfigError(f"--draft: {other}")
    if dtype == "auto" and networks[0].device.type == "cpu":
        networks[0].float()  # 16-bit products in torch take several times as long on many CPUs
    trained = networks[1]
    kept = trained.dtype
    trained.float().requires_grad_(True)
    tokenizer_json = files[1].tokenizer_json if files[1] else None
    return Pair(networks[0], trained, kept, hashes[0], min(sizes), tokenizer_json)


def save_draft(pair: Pair, folder: Path) -> None:
    """Write the draft's weights and tokenizer to a new folder, which appears only when it is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    making = folder.with_name(folder.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    try:
        pair.draft.to(pair.draft_dtype).save_pretrained(making)
        if pair.tokenizer_json is not None:
            (making / "tokenizer.json").write_bytes(pair.tokenizer_json)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(making, ignore_errors=True)
        raise ConfigError(f"--out: cannot write the draft ({error}); the same command goes on") from error
    making.rename(folder)
