"""The process of a follower, a rank other than 0: it computes its part of every step that rank 0 sends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading

from outrider.config import VerifyConfig
from outrider.engine.loading.check_forward import CHECK_PAGE_SIZE, CHECK_PAGES
from outrider.engine.loading.replica import largest_step, runner_of
from outrider.engine.make_runner import make_runner
from outrider.engine.parallel.meeting import board_of, open_store
from outrider.engine.parallel.mirror import follow
from outrider.engine.parallel.order import Order, cpu_share
from outrider.engine.parallel.processes import MODULE
from outrider.engine.parallel.ranks import MAX_WAIT_SECONDS, Ranks
from outrider.engine.parallel.shard import Shard
from outrider.out_of_memory import lacks_memory, problem_of
from outrider.process import STOP_SIGNALS, pin_cpus
from outrider.protocol.errors import OutriderError
from outrider.telemetry.logs import configure_logging, get_logger

logger = get_logger(MODULE)
READY = "ready"
"""The stage at which all ranks are ready for the first step."""
END_SECONDS = 1.0
"""Longest wait, after another rank is lost, for word that it was rank 0."""


def main() -> int:
    """Read an order from standard input and carry it out; returns the exit status."""
    order = Order.model_validate_json(sys.stdin.buffer.readline())
    configure_logging(f"verify rank {order.rank}", order.config.log_level, order.config.log_format)
    parent = threading.Thread(target=_end_with_input, args=(order.meeting,), name="parent", daemon=True)
    parent.start()
    try:
        pin_cpus(cpu_share(order.config, order.rank))
        carry_out(order)
    except OutriderError as error:
        logger.error("this rank ends", problem=str(error))
        parent.join(END_SECONDS)  # if rank 0 was killed, this ends the process
        return 1
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        logger.error("this rank ends", problem=problem_of(error))
        return 1
    return 0


def order_of(config: VerifyConfig) -> Order:
    """Return the order of a rank that was started on a machine of its own."""
    pin_cpus(config.cpus)
    address, rank = config.tensor_parallel_address, config.tensor_parallel_rank
    return Order(config=config, rank=rank, meeting=address, seconds=MAX_WAIT_SECONDS)


def carry_out(order: Order) -> None:
    """Load a rank's part of the model and follow rank 0 until it closes.

    Signals that ask the process to end are ignored: rank 0 drains first. A rank that was started by hand
    obeys them until it has met rank 0, which may be gone for good and replaced by one that waits for a new
    rank.

    Raises:
        ConfigError: the model cannot be loaded.
        LostRank: another rank is gone.
    """
    config = order.config
    if not config.tensor_parallel_address:
        _ignore_signals()
    shard = Shard(order, logger.info)
    ranks = Ranks(
        *(open_store(order), order.rank, config.tensor_parallel, shard.device),
        seconds=order.seconds,
        board=board_of(order, shard.device),
    )
    _ignore_signals()
    loaded, _ = shard.small(ranks)
    follow(make_runner(loaded, CHECK_PAGES, CHECK_PAGE_SIZE), ranks)
    loaded = shard.whole(ranks)
    runner = runner_of(config, loaded, largest=largest_step(config), say=logger.info)
    ranks.meet(READY)
    follow(runner, ranks)
    ranks.leave()


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_with_input(meeting: str) -> None:
    """End this process when rank 0's has ended, in whatever way.

    If that was killed, it has left the folder in which they met.
    """
    # This does not use `sys.stdin`: Python aborts if a thread still reads it at exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(os.path.dirname(meeting), ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
