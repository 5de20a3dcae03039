"""Rank 0: starts the other ranks, checks that together they compute the model, and makes them follow its
runner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress

from outrider.config import VerifyConfig
from outrider.engine.loading.check_determinism import check_determinism, refuse_library
from outrider.engine.loading.check_forward import check_numbers, check_paged
from outrider.engine.loading.replica import largest_step, runner_of
from outrider.engine.parallel.follower import READY
from outrider.engine.parallel.meeting import board_of, open_store
from outrider.engine.parallel.mirror import Leading
from outrider.engine.parallel.order import Order, check_settings, missing_cores
from outrider.engine.parallel.processes import Processes
from outrider.engine.parallel.ranks import MAX_WAIT_SECONDS, Ranks
from outrider.engine.parallel.shard import Shard
from outrider.engine.runner import ModelRunner
from outrider.protocol.errors import LostRank


class Group(Leading):
    """All ranks of a replica, seen from rank 0; the mirror of its runner."""

    def __init__(self, order: Order, shard: Shard) -> None:
        """Start the ranks of this machine and wait until all ranks have come.

        Raises:
            LostRank: a rank did not come.
        """
        config = order.config
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        meeting = config.tensor_parallel_address or os.path.join(self._folder.name, "store")
        order = order.model_copy(update={"meeting": meeting})
        started = () if config.tensor_parallel_address else range(1, config.tensor_parallel)
        self._processes = Processes([order.model_copy(update={"rank": rank}) for rank in started])
        try:
            self.ranks = Ranks(
                *(open_store(order), 0, config.tensor_parallel, shard.device),
                seconds=order.seconds,
                check=self._processes.check,
                board=board_of(order, shard.device),
            )
        except BaseException:
            self._processes.close()
            self._folder.cleanup()
            raise
        super().__init__(self.ranks)

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` with a sentence, on a thread, when a rank of this machine ends by itself."""
        self._processes.watch(on_loss)

    def close(self) -> None:
        """See `outrider.engine.runner.Mirror`: the other ranks end."""
        if not self.ranks.failed:
            with suppress(LostRank):
                self.end()
        self.leave()

    def leave(self) -> None:
        """Leave the other ranks, which may be loading and not listen for steps: they end by themselves."""
        self._processes.close()
        self.ranks.leave()
        self._folder.cleanup()


def load_parallel(
    config: VerifyConfig,
    *,
    say: Callable[[str], None],
    seconds: float = MAX_WAIT_SECONDS,
) -> tuple[ModelRunner, Group]:
    """Return the runner of rank 0, this process, with KV memory for `kv_tokens`, and the `tensor_parallel`
    ranks of the model that follow it. Blocks.

    A rank that takes `seconds` longer than another for its part of a product is lost.

    Raises:
        ConfigError: a setting is wrong or the model cannot be loaded.
        LostRank: a rank has ended.
    """
    check_settings(config)
    if (warning := missing_cores(config)) is not None:
        say(f"tensor_parallel: {warning}")
    order = Order(config=config, rank=0, meeting="", seconds=seconds)
    shard = Shard(order, say)
    group = Group(order, shard)
    try:
        runner = _load(config, shard, group, say)
    except BaseException:
        group.leave()
        raise
    return runner, group


def _load(config: VerifyConfig, shard: Shard, group: Group, say: Callable[[str], None]) -> ModelRunner:
    def lead(runner: ModelRunner) -> None:
        runner.mirror = group

    loaded, plain = shard.small(group.ranks)
    say("checking a small model of this kind against this engine, in all ranks")
    check_paged(loaded, plain, prepare=lead)
    if config.deterministic:
        say("checking that a token's bits do not depend on its batch")
        check_determinism(loaded, lead)
    group.end()
    loaded = shard.whole(group.ranks)
    if config.deterministic:
        refuse_library(loaded)
    runner = runner_of(config, loaded, largest=largest_step(config), say=say)
    group.ranks.meet(READY)
    lead(runner)
    check_numbers(runner)
    return runner
