"""Loads a drafter with an EAGLE-3 head or an MTP layer. Imports torch."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from draft_service.drafters.head import HeadDrafter
from outrider.config import DraftConfig
from outrider.engine.heads.base import Head
from outrider.engine.heads.loading import load_head
from outrider.engine.kv.capacity import DEFAULT_TOKENS
from outrider.engine.loading.first_checks import NO_TARGET
from outrider.engine.loading.model_config import SET_CONTEXT, token_ids
from outrider.engine.loading.model_path import name_of
from outrider.engine.loading.tokenizer_files import json_file, load_tokenizer, vocabulary_hash
from outrider.process import parse_cpus
from outrider.protocol.errors import ConfigError
from outrider.protocol.messages import ModelInfo
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)


def load_head_drafter(
    config: DraftConfig, replica: str, kind: Literal["eagle", "mtp"]
) -> tuple[HeadDrafter, ModelInfo]:
    """Return the drafter that the settings ask for, and what it serves.

    Raises:
        ConfigError: a setting is wrong or the head cannot be loaded.
    """
    _check(config, kind)
    head = load_head(
        config.model,
        config.target,
        kind=kind,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        helper_cores=parse_cpus("helper_cpus", config.helper_cpus),
        cpu_backend=config.cpu_backend,
        say=logger.info,
    )
    info = _describe(config, head, replica)
    drafter = HeadDrafter(
        head,
        children=config.children,
        max_nodes=config.max_nodes,
        max_rows=config.kv_tokens or DEFAULT_TOKENS,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
    )
    return drafter, info


def _check(config: DraftConfig, kind: str) -> None:
    if kind == "eagle" and not config.target:
        raise ConfigError(NO_TARGET)
    if config.weights != "full" or config.skip_layers or config.kv_dtype != "auto":
        raise ConfigError(
            "weights, skip_layers, kv_dtype: an EAGLE head or MTP layer is used as it is; leave them out"
        )


def _describe(config: DraftConfig, head: Head, replica: str) -> ModelInfo:
    source = config.tokenizer_of(head.kind)
    files, target = load_tokenizer(source), json_file(source, "config.json")
    text: dict[str, Any] = target.get("text_config") or target
    limit = int(text.get("max_position_embeddings") or 0)
    if not (config.context_length or limit):
        raise ConfigError(f"context_length: config.json of the target names none; {SET_CONTEXT}")
    generation = json_file(source, "generation_config.json") or text
    return ModelInfo(
        model=name_of(config.model),
        vocabulary_hash=vocabulary_hash(files.tokenizer_json if files else None, head.vocab_size),
        vocabulary_size=head.vocab_size,
        context_length=config.context_length or limit,
        eos_token_ids=token_ids("eos_token_id", generation.get("eos_token_id"), head.vocab_size),
        replica=replica,
        incarnation=secrets.token_hex(8),
        max_sessions=config.max_sessions,
        kind=head.kind,
        dtype=str(head.dtype).removeprefix("torch."),
        device=str(head.device),
        feature_layers=tuple(sorted(set(head.feature_layers))),
        hidden_size=head.target_hidden_size,
    )
