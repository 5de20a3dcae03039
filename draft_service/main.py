"""Starts a draft replica: load the drafter, start its engine, serve."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from functools import partial

from draft_service.core import DraftCore
from draft_service.drafters.base import Drafter, Expansion
from draft_service.drafters.lookup import MAX_VOCABULARY, LookupDrafter
from draft_service.engine import DraftEngine
from draft_service.exchange import WeightExchange
from draft_service.servicer import DraftServicer
from outrider.config import DraftConfig
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.vocabulary import load_vocabulary
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.process import in_thread, run_service
from outrider.protocol.errors import ConfigError, OutriderError
from outrider.protocol.messages import ModelInfo, OpenDraft, SamplingParams
from outrider.rpc.engine_shell import end_process
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.device_memory import device_memory
from outrider.telemetry.instruments import DraftInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
"""Tokens per KV page."""
WARM_UP_KEY = -1
WARM_UP_FORWARDS = 3


async def run(config: DraftConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    await run_service("draft", config, [SERVICE], lambda server: _build(config, server))


class DraftReplica:
    """A running replica."""

    def __init__(self, engine: DraftEngine, exchange: WeightExchange | None = None) -> None:
        self._engine = engine
        self._watching = asyncio.create_task(exchange.run()) if exchange is not None else None

    @property
    def failure(self) -> OutriderError | None:
        """See `outrider.process.Service`."""
        return self._engine.failure

    def running(self) -> int:
        """Open sessions."""
        return self._engine.sessions

    async def close(self) -> None:
        """Stop the engine."""
        if self._watching is not None:
            self._watching.cancel()
        await self._engine.stop()


async def _build(config: DraftConfig, server: GrpcServer) -> DraftReplica:
    name = config.name or server.endpoint
    drafter, info = await in_thread(lambda: load_drafter(config, name))
    if config.reload_model and not hasattr(drafter, "exchange"):
        raise ConfigError(f"reload_model: a {info.kind} draft has no weights to exchange; leave it out")
    grammars = await in_thread(lambda: load_grammars(config, info))
    instruments = DraftInstruments()
    instruments.files.watch(server.watched)
    if info.version:
        instruments.weights(info.version)
    instruments.capacity.set(config.max_sessions, lambda: device_memory(info.device))
    engine = DraftEngine(
        lambda deliver: DraftCore(drafter, config, instruments, deliver, eos_token_ids=info.eos_token_ids),
        config,
        on_failure=end_process,
    )
    servicer = DraftServicer(engine, info, grammars)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)  # type: ignore[no-untyped-call]
    engine.start()
    if not config.reload_model:
        return DraftReplica(engine)
    reload = partial(load_drafter, config, name)
    return DraftReplica(engine, WeightExchange(config.model, drafter, reload, engine, servicer, instruments))


def load_drafter(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    """The drafter that the settings ask for, and what it serves.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    drafter, info = _load(config, replica)
    return drafter, replace(info, version=_version(config), shadow=config.shadow)


def _load(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
    if config.kind == "lookup":
        return _load_lookup(config, replica)
    from outrider.engine.eagle.description import is_head
    from outrider.engine.loading.model_path import check_model_path
    from outrider.engine.loading.tokenizer_files import json_file

    check_model_path(config.model)
    if config.kind == "eagle" or is_head(json_file(config.model, "config.json")):
        from draft_service.load_eagle import load_eagle

        return load_eagle(config, replica)
    return _load_model(config, replica)


def _version(config: DraftConfig) -> str:
    if config.kind == "lookup":
        return ""
    from outrider.engine.loading.weights_version import weights_version

    return weights_version(config.model, config.skip_layers, config.weights, config.kv_dtype)


def load_grammars(config: DraftConfig, info: ModelInfo) -> GrammarCompiler | None:
    """What holds proposals to constraints; None for a lookup, and where the tokenizer does not do for it.

    Raises:
        ConfigError: a file of the tokenizer cannot be read.
    """
    if config.kind == "lookup":
        return None
    from outrider.engine.loading.tokenizer_files import load_tokenizer

    files = load_tokenizer(config.target if info.kind == "eagle" else config.model)
    vocabulary = load_vocabulary(files.tokenizer_json if files else None, info.eos_token_ids)
    return None if vocabulary is None else GrammarCompiler(vocabulary)


def _load_lookup(config: DraftConfig, replica: str) -> tuple[Drafter, ModelInfo]:
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
    # Imports torch, which takes seconds and which a lookup drafter does without.
    from draft_service.drafters.model import PREFILL_CHUNK, ModelDrafter
    from outrider.engine.loading.replica import load_runner, model_info
    from outrider.engine.loading.tokenizer_files import load_tokenizer
    from outrider.engine.step import StepSize

    largest = StepSize(PREFILL_CHUNK + config.expansions, config.expansions)
    runner = load_runner(config, largest=largest, say=logger.info)
    info = model_info(config, runner.loaded, load_tokenizer(config.model), kind="model", replica=replica)
    drafter = ModelDrafter(runner, children=config.children, max_nodes=config.max_nodes)
    _warm_up(drafter)
    return drafter, info


def _warm_up(drafter: Drafter) -> None:
    """Run a few forwards: the first ones are slow, and no request should wait for them."""
    sampling = SamplingParams(temperature=1.0)
    drafter.open(WARM_UP_KEY, OpenDraft(request_id="", token_ids=(0,), prompt_length=1, sampling=sampling))
    for _ in range(WARM_UP_FORWARDS):
        drafter.expand([Expansion(WARM_UP_KEY, None)])
        drafter.reset(WARM_UP_KEY)
    drafter.close(WARM_UP_KEY)
