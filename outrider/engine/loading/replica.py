"""What draft and verify replicas have in common: loading the model of their settings, and describing what
they serve."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from outrider.config import DraftConfig, EngineConfig, VerifyConfig
from outrider.engine.kv.capacity import DEFAULT_TOKENS, PAGE_SIZE, kv_capacity
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.tokenizer_files import TokenizerFiles, vocabulary_hash
from outrider.engine.make_runner import make_runner
from outrider.engine.runner import ModelRunner
from outrider.engine.step import StepSize
from outrider.layer_lists import parse_layers
from outrider.process import parse_cpus
from outrider.protocol.messages import ModelInfo
from outrider.telemetry.device_memory import device_memory


def load_runner(
    config: EngineConfig, *, largest: StepSize, say: Callable[[str], None], deterministic: bool = False
) -> ModelRunner:
    """Return the model with KV memory for `kv_tokens`, for steps of up to the `largest` size. Blocks.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    draft = config if isinstance(config, DraftConfig) else None
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        helper_cores=parse_cpus("helper_cpus", config.helper_cpus),
        cpu_backend=config.cpu_backend,
        context_length=config.context_length,
        trust_remote_code=config.trust_remote_code,
        deterministic=deterministic,
        skipped_layers=parse_layers(draft.skip_layers) if draft else (),
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        say=say,
    )
    return runner_of(config, loaded, largest=largest, say=say)


def runner_of(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    largest: StepSize,
    say: Callable[[str], None],
) -> ModelRunner:
    """Return a loaded model with the KV memory that the settings ask for.

    Raises:
        ModelError: the memory is too small.
    """
    pages = _kv_pages(config, loaded, say)
    runner = make_runner(loaded, pages, PAGE_SIZE, largest=largest, say=say)
    runner.pool.sharing = config.prefix_cache
    return runner


def _kv_pages(config: EngineConfig, loaded: LoadedModel, say: Callable[[str], None]) -> int:
    """Return the pages for the tokens that the settings ask for, or for as many as fit.

    All ranks of a model need the same number, so with several ranks the free memory of one does not count.
    """
    free = 0 if loaded.ranks > 1 else device_memory(str(loaded.device))[0]
    tokens = kv_capacity(config.kv_tokens, loaded.kv_bytes_per_token, free)
    if tokens < (config.kv_tokens or DEFAULT_TOKENS):
        say(f"the KV memory holds {tokens} tokens: {free / 1e9:.1f} GB are free; kv_tokens sets a number")
    return -(-tokens // PAGE_SIZE)


def largest_step(config: VerifyConfig) -> StepSize:
    """Return the largest size of a target's step: the logits of every token may be wanted."""
    return StepSize(config.max_step_tokens, config.max_step_tokens)


def model_info(
    config: EngineConfig,
    loaded: LoadedModel,
    files: TokenizerFiles | None,
    *,
    kind: str,
    replica: str,
    served_name: str = "",
) -> ModelInfo:
    """Return what the replica of this name serves, in a new incarnation."""
    return ModelInfo(
        model=served_name or loaded.name,
        vocabulary_hash=vocabulary_hash(files.tokenizer_json if files else None, loaded.vocabulary_size),
        vocabulary_size=loaded.vocabulary_size,
        context_length=loaded.context_length,
        eos_token_ids=loaded.eos_token_ids,
        bos_token_id=loaded.bos_token_id,
        replica=replica,
        incarnation=secrets.token_hex(8),
        max_sessions=config.max_sessions,
        kind=kind,
        dtype=loaded.dtype_name,
        device=str(loaded.device),
        arithmetic=loaded.arithmetic,
        arithmetic_reason=loaded.choice.reason if loaded.choice else "",
        hidden_size=loaded.hidden_size if kind == "target" else 0,
        num_layers=loaded.num_layers if kind == "target" else 0,
    )
