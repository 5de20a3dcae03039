"""A verify replica: the loaded and measured target, its engine and its servicer. Imports torch."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.config import VerifyConfig
from outrider.engine.kv.page_memory import PageMemory
from outrider.engine.loading.replica import largest_step, load_runner, model_info
from outrider.engine.loading.sampling_defaults import load_sampling_defaults, not_followed
from outrider.engine.loading.tokenizer_files import TokenizerFiles, load_tokenizer
from outrider.engine.runner import ModelRunner
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol.errors import LostRank, OutriderError
from outrider.protocol.kv_parts import KvLayout
from outrider.protocol.messages import ModelInfo
from outrider.rpc.engine_shell import end_process
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.device_memory import device_memory
from outrider.telemetry.instruments import VerifyInstruments
from outrider.telemetry.logs import get_logger
from verify_service.core import CoreSettings, VerifyCore
from verify_service.engine import VerifyEngine
from verify_service.servicer import VerifyServicer
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.measure import measure_costs
from verify_service.transfer.exchange import KvExchange

if TYPE_CHECKING:
    from outrider.engine.parallel.leader import Group

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyReplica:
    """A running replica."""

    engine: VerifyEngine
    runner: ModelRunner
    group: Group | None = None
    """The ranks that compute the target, if there are several."""

    @property
    def failure(self) -> OutriderError | None:
        """See `outrider.process.Service`."""
        return self.engine.failure

    def running(self) -> int:
        """Number of open sessions and of sequences on their way to another replica, which end with the
        engine."""
        return self.engine.sessions + (self.engine.moving if self.failure is None else 0)

    async def close(self) -> None:
        """Stop the engine, and the other ranks of the target if there are any. After a failure these may be
        in the middle of a step, where they would not hear that it is the last."""
        await self.engine.stop()
        failed = self.failure is not None
        await asyncio.to_thread(self.group.leave if self.group is not None and failed else self.runner.close)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """The target, ready to run."""

    runner: ModelRunner
    tokenizer: TokenizerFiles | None
    grammars: GrammarCompiler | None
    cost: CostModel
    max_step_tokens: int
    group: Group | None = None
    """The ranks that compute the target, if there are several."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def load_target(config: VerifyConfig) -> LoadedTarget:
    """Load the model and measure its step time; blocks.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    runner, group = _load_runner(config)
    max_step_tokens = min(config.max_step_tokens, _longest(runner))
    runner.drafting(False)
    cost = measure_costs(runner, max_step_tokens, runner.row_edges)
    logger.info(
        "measured",
        step_ms=round(cost.seconds(1) * 1e3, 3),
        largest_step_ms=round(cost.seconds(max_step_tokens) * 1e3, 3),
    )
    tokenizer = find_tokenizer(config.model)
    tokenizer_json = tokenizer.tokenizer_json if tokenizer else None
    grammars = GrammarCompiler.load(tokenizer_json, runner.loaded.eos_token_ids)
    defaults = _sampling_defaults(config)
    return LoadedTarget(runner, tokenizer, grammars, cost, max_step_tokens, group, defaults)


def find_tokenizer(model: str) -> TokenizerFiles | None:
    """Return the target's tokenizer; a warning says if there is none."""
    files = load_tokenizer(model)
    if files is None:
        logger.warning("the model came without a tokenizer: requests need token ids, and get no text")
    return files


def _sampling_defaults(config: VerifyConfig) -> dict[str, float]:
    """Return the sampling defaults of the model's file; none if the settings ignore the file."""
    if config.generation_config == "none":
        return {}
    if left := not_followed(config.model):
        logger.warning("the model's settings ask for what is not done here", settings=", ".join(left))
    return load_sampling_defaults(config.model)


def _load_runner(config: VerifyConfig) -> tuple[ModelRunner, Group | None]:
    """Load the target in this process, or in several."""
    if config.tensor_parallel == 1:
        runner = load_runner(
            config,
            largest=largest_step(config),
            say=logger.info,
            deterministic=config.deterministic,
        )
        return runner, None
    from outrider.engine.parallel.leader import load_parallel

    return load_parallel(config, say=logger.info)


def load_replica(config: VerifyConfig) -> Callable[[GrpcServer], VerifyReplica]:
    """Load the target; blocks. Return a function that starts the replica on a server, on its event loop.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
    """
    target = load_target(config)
    return lambda server: _start(config, target, server)


def _start(config: VerifyConfig, target: LoadedTarget, server: GrpcServer) -> VerifyReplica:
    info = describe(config, target, server.replica)
    instruments = VerifyInstruments()
    instruments.files.watch(server.watched)
    engine = make_engine(config, target, info, instruments)
    exchange = _exchange(engine, config, target, info)
    VerifyServicer(engine, info, target.tokenizer, target.grammars, exchange).register(server.server)
    engine.start()
    if target.group is not None:
        target.group.watch(lambda reason: engine.fail(LostRank(reason)))
    return VerifyReplica(engine, target.runner, target.group)


def describe(config: VerifyConfig, target: LoadedTarget, replica: str) -> ModelInfo:
    """What the replica serves. No sequence may be longer than its whole KV memory: it would never end."""
    info = model_info(
        config,
        target.runner.loaded,
        target.tokenizer,
        kind="target",
        replica=replica,
        served_name=config.served_name,
    )
    longest, limit = _longest(target.runner), target.runner.loaded.context_length
    if longest < limit:
        logger.warning(f"sequences have at most {longest} tokens: kv_tokens has no room for {limit}")
    memory = target.runner.page_memory()
    kv_layout = "" if memory is None else layout_of(target.runner, memory).name
    return replace(
        info,
        context_length=longest,
        sampling_defaults=target.sampling_defaults,
        kv_layout=kv_layout,
        version=version_of(target.runner.loaded.fingerprint, target.tokenizer),
    )


def version_of(fingerprint: str, files: TokenizerFiles | None) -> str:
    """The fingerprint of the weights and of what makes tokens of texts and messages: with another chat
    template, too, the rest of a text would not fit its beginning. Empty if the weights have none."""
    if not fingerprint or files is None:
        return fingerprint
    parts = {**asdict(files), "tokenizer_json": files.tokenizer_json.decode(), "weights": fingerprint}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _longest(runner: ModelRunner) -> int:
    """Most tokens of a sequence."""
    return min(runner.pool.num_pages * runner.pool.page_size, runner.loaded.context_length)


def layout_of(runner: ModelRunner, memory: PageMemory) -> KvLayout:
    """Return what determines this replica's keys and values, and their layout in a page."""
    loaded = runner.loaded
    return KvLayout(
        loaded.fingerprint, loaded.arithmetic, loaded.kv_dtype_name, runner.pool.page_size, memory.shape
    )


def _exchange(
    engine: VerifyEngine, config: VerifyConfig, target: LoadedTarget, info: ModelInfo
) -> KvExchange | None:
    memory = target.runner.page_memory()
    if memory is None:
        return None
    layout = layout_of(target.runner, memory)
    return KvExchange(engine, memory, layout, info.vocabulary_size, info.context_length, config.lease_seconds)


def make_engine(
    config: VerifyConfig, target: LoadedTarget, info: ModelInfo, instruments: VerifyInstruments
) -> VerifyEngine:
    """Return an engine that is not started yet."""
    room = {"max_nodes": target.runner.candidates(config.max_nodes)}
    settings = CoreSettings.of(config.model_copy(update=room), info, target.max_step_tokens)
    instruments.capacity.set(config.max_sessions, lambda: device_memory(info.device))
    return VerifyEngine(
        lambda deliver: VerifyCore(target.runner, target.cost, settings, instruments, deliver),
        max_sessions=config.max_sessions,
        on_failure=end_process,
    )
