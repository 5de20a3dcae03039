"""Loads the drafter that the settings ask for. Imports torch only where the drafter needs it."""

from __future__ import annotations

import secrets
from dataclasses import replace

from draft_service.drafters.base import Drafter, Expansion, FeatureReader
from draft_service.drafters.lookup import MAX_VOCABULARY, LookupDrafter
from draft_service.files import files_of
from draft_service.scheduler import PREFILL_CHUNK
from outrider.config import DraftConfig
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol.allowance import row_bytes
from outrider.protocol.errors import ConfigError, Overloaded
from outrider.protocol.messages import ModelInfo, OpenDraft, SamplingParams
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
WARM_UP_KEY = -1
WARM_UP_FORWARDS = 3
"""The first is computed, the second recorded, and the third repeats the recording; see `RecordedForward`."""


def load_drafter(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    """Return the drafter that the settings ask for, and what it serves.

    If the model's files change meanwhile, they are loaded again: the version would be that of others.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    while True:
        before = files_of(config.model)
        found = _loaded(config, replica)
        if files_of(config.model) == before:
            return found
        logger.warning("the model's files have changed while they were loaded; loading them again")


def _loaded(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    drafter, info = _load(config, replica)
    if drafter.expands:
        try:
            _warm_up(drafter, info)
        except Overloaded as error:  # the first session of all
            tree = f"a tree of {drafter.max_nodes} nodes"
            raise ConfigError(
                f"kv_tokens: no text fits beside {tree}; raise it, or lower max_nodes"
            ) from error
    return drafter, replace(info, version=_version(config), shadow=config.shadow)


def _load(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    if config.kind == "lookup":
        return _load_lookup(config, replica)
    from outrider.engine.heads.eagle_config import is_head
    from outrider.engine.loading.tokenizer_files import json_file

    named_eagle = config.kind == "model" and is_head(json_file(config.model, "config.json"))
    kind = "eagle" if named_eagle else config.kind
    if kind == "model":
        return _load_model(config, replica)
    from draft_service.load_head import load_head_drafter

    return load_head_drafter(config, replica, kind)


def _version(config: DraftConfig) -> str:
    if config.kind == "lookup":
        return ""
    if config.kind == "mtp":
        from outrider.engine.heads.mtp_loading import mtp_version

        return mtp_version(config.model)
    from outrider.engine.loading.weights_version import weights_version

    return weights_version(config.model, config.skip_layers, config.weights, config.kv_dtype)


def load_grammars(config: DraftConfig, info: ModelInfo) -> GrammarCompiler | None:
    """Return the compiler of grammars for constraints; None for a lookup, and where the tokenizer does not
    support them.

    Raises:
        ConfigError: a file of the tokenizer cannot be read.
    """
    if config.kind == "lookup":
        return None
    from outrider.engine.loading.tokenizer_files import load_tokenizer

    files = load_tokenizer(config.tokenizer_of(info.kind))
    return GrammarCompiler.load(files.tokenizer_json if files else None, info.eos_token_ids)


def _load_lookup(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    if config.model:
        logger.warning("a lookup uses no model; set kind to use this one", model=config.model)
    info = ModelInfo(
        model="lookup",
        vocabulary_hash=_tokenizer_hash(config.tokenizer) if config.tokenizer else "",
        vocabulary_size=MAX_VOCABULARY,
        context_length=config.context_length or MAX_VOCABULARY,
        replica=replica,
        incarnation=secrets.token_hex(8),
        max_sessions=config.max_sessions,
        kind="lookup",
    )
    return LookupDrafter(config.max_nodes, config.max_depth), info


def _tokenizer_hash(tokenizer: str) -> str:
    from outrider.engine.loading.tokenizer_files import load_tokenizer, vocabulary_hash

    files = load_tokenizer(tokenizer)
    if files is None:
        raise ConfigError(
            f"tokenizer: {tokenizer!r} has no tokenizer.json; leave it empty to accept any target"
        )
    return vocabulary_hash(files.tokenizer_json, 0)


def _load_model(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    # Imports torch, which takes seconds and which a lookup drafter does not need.
    from draft_service.drafters.model import ModelDrafter
    from outrider.engine.loading.replica import load_runner, model_info
    from outrider.engine.loading.tokenizer_files import load_tokenizer
    from outrider.engine.step import StepSize

    largest = StepSize(PREFILL_CHUNK + config.expansions, config.expansions)
    runner = load_runner(config, largest=largest, say=logger.info)
    info = model_info(config, runner.loaded, load_tokenizer(config.model), kind="model", replica=replica)
    max_nodes = runner.candidates(config.max_nodes)
    return ModelDrafter(runner, children=config.children, max_nodes=max_nodes), info


def _warm_up(drafter: Drafter, info: ModelInfo) -> None:
    """Run a few forwards: the first forwards are slow, and no request should wait for them."""
    sampling, layers = SamplingParams(temperature=1.0), info.feature_layers
    request = OpenDraft(
        request_id="", token_ids=(0, 0), prompt_length=1, sampling=sampling, feature_layers=layers
    )
    for _ in range(WARM_UP_FORWARDS):
        drafter.open(WARM_UP_KEY, request)
        if isinstance(drafter, FeatureReader):
            drafter.tell(WARM_UP_KEY, bytes(row_bytes(len(layers), info.hidden_size)))
        drafter.expand([Expansion(WARM_UP_KEY, None)])
        drafter.close(WARM_UP_KEY)
