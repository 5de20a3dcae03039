"""Loads a drafter with an EAGLE-3 head. Imports torch."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from draft_service.drafters.eagle import EagleDrafter
from outrider.config import DraftConfig
from outrider.engine.eagle.head import EagleHead
from outrider.engine.eagle.loading import load_head
from outrider.engine.kv.capacity import DEFAULT_TOKENS
from outrider.engine.loading.model_config import SET_CONTEXT
from outrider.engine.loading.tokenizer_files import json_file, load_tokenizer, vocabulary_hash
from outrider.process import parse_cpus
from outrider.protocol.errors import ConfigError
from outrider.protocol.messages import ModelInfo
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)


def load_eagle(config: DraftConfig, replica: str) -> tuple[EagleDrafter, ModelInfo]:
    """Return the drafter that the settings ask for, and what it serves.

    Raises:
        ConfigError: a setting is wrong or the head cannot be loaded.
    """
    _check(config)
    head = load_head(
        config.model,
        config.target,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        helper_cores=parse_cpus("helper_cpus", config.helper_cpus),
        cpu_backend=config.cpu_backend,
        progress=logger.info,
    )
    info = _describe(config, head, replica)
    drafter = EagleDrafter(
        head,
        children=config.children,
        max_nodes=config.max_nodes,
        max_rows=config.kv_tokens or DEFAULT_TOKENS,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
    )
    return drafter, info


def _check(config: DraftConfig) -> None:
    if not config.target:
        raise ConfigError(
            "target: not set; name the folder or hub id of the target that the EAGLE head was trained for"
        )
    if config.weights != "full" or config.skip_layers or config.kv_dtype != "auto":
        raise ConfigError("weights, skip_layers, kv_dtype: an EAGLE head is used as it is; leave them out")


def _describe(config: DraftConfig, head: EagleHead, replica: str) -> ModelInfo:
    files, target = load_tokenizer(config.target), json_file(config.target, "config.json")
    text: dict[str, Any] = target.get("text_config") or target
    limit = int(text.get("max_position_embeddings") or 0)
    if not (config.context_length or limit):
        raise ConfigError(f"context_length: config.json of the target names none; {SET_CONTEXT}")
    generation = json_file(config.target, "generation_config.json") or text
    return ModelInfo(
        model=Path(config.model).name,
        vocabulary_hash=vocabulary_hash(files.tokenizer_json if files else None, head.config.vocab_size),
        vocabulary_size=head.config.vocab_size,
        context_length=config.context_length or limit,
        eos_token_ids=_ids(generation.get("eos_token_id")),
        replica=replica,
        incarnation=secrets.token_hex(8),
        max_sessions=config.max_sessions,
        kind="eagle",
        dtype=str(head.dtype).removeprefix("torch."),
        device=str(head.device),
        feature_layers=tuple(sorted(set(head.config.feature_layers))),
        hidden_size=head.config.target_hidden_size,
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
