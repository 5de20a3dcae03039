"""What a rank gets at start: the settings of its replica, its number, and where the ranks meet."""

from __future__ import annotations

from outrider.config import Settings, VerifyConfig
from outrider.cores import allowed_cores, default_threads
from outrider.process import parse_cpus
from outrider.protocol.errors import ConfigError
from outrider.sockets import MAX_PORT


class Order(Settings):
    """One rank's work, as JSON on the standard input of its process."""

    config: VerifyConfig
    rank: int
    meeting: str
    """A file of this machine, or host:port of rank 0."""
    seconds: float
    """Longest wait for another rank's part of a product."""


def check_settings(config: VerifyConfig) -> None:
    """Refuse settings that do not go with several ranks.

    Raises:
        ConfigError: names the setting.
    """
    if config.helper_cpus:
        raise ConfigError("helper_cpus: ranks of tensor_parallel have no helpers; leave it empty")
    if ":" in config.device:
        raise ConfigError("device: each rank of tensor_parallel takes a device of its own; say cuda or cpu")
    if config.tensor_parallel_rank >= config.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel_rank: there are the ranks 0 to {config.tensor_parallel - 1}; set one of them"
        )
    if config.tensor_parallel_rank and not config.tensor_parallel_address:
        raise ConfigError("tensor_parallel_rank: ranks of several machines need tensor_parallel_address")
    if config.tensor_parallel_address:
        split_address(config.tensor_parallel_address)


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Raises:
        ConfigError: the address is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ConfigError(
            f"tensor_parallel_address: {address!r} is not host:port of rank 0; ports are 1 to {MAX_PORT}"
        )
    return host, int(port)


def cpu_share(config: VerifyConfig, rank: int) -> str:
    """Return the cores of a rank: an equal part of `cpus`, or all of them where there are fewer cores than
    ranks."""
    ranks = config.tensor_parallel
    cores = parse_cpus("cpus", config.cpus)
    if config.tensor_parallel_address or len(cores) < ranks:
        return config.cpus
    return ",".join(map(str, cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]))


def threads_of(config: VerifyConfig) -> int:
    """Return how many threads each rank has: what was asked for, or one for each of its cores. To be called
    by a rank that is pinned to them."""
    local = _local_ranks(config)
    apart = len(parse_cpus("cpus", config.cpus)) >= local
    return config.threads or max(1, default_threads() // (1 if apart else local))


def missing_cores(config: VerifyConfig) -> str | None:
    """Return a warning if the ranks of this machine have more threads than there are cores, otherwise
    None."""
    local = _local_ranks(config)
    cores = len(parse_cpus("cpus", config.cpus)) or len(allowed_cores())
    if local * config.threads <= cores:
        return None
    many = f"{local} ranks of {config.threads} threads share {cores} cores"
    return f"{many} and slow each other down; set threads lower"


def _local_ranks(config: VerifyConfig) -> int:
    """Return how many of the ranks run on this machine."""
    return 1 if config.tensor_parallel_address else config.tensor_parallel
