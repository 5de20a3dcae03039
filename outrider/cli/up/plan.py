"""Settings of `outrider up`, and the processes that they call for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from pydantic import Field

from outrider.cli.settings import Resolved, flag_of
from outrider.config import (
    CollectConfig,
    KvDtype,
    OptionalPort,
    OutputConfig,
    Port,
    Positive,
    RunConfig,
    Threads,
    Weights,
)
from outrider.protocol.errors import ConfigError

LOOKUP = "lookup"
MTP = "mtp"
NONE = "none"
MAX_REPLICAS = 64
"""Most replicas of a kind: each is a process with a model of its own, and they all start at once."""


class UpConfig(RunConfig, CollectConfig, OutputConfig):
    """All services on one machine."""

    target: str = Field("", description="Folder or hub id of the target model.")
    draft: tuple[str, ...] = Field(
        (LOOKUP,),
        min_length=1,
        description="Folder or hub id of a draft model or EAGLE head, mtp, lookup, none, or several kinds.",
    )
    drafts_per_session: Positive = Field(1, description="Drafts that one session uses at once.")
    weights: Weights = Field("full", description="int8 and int4 round the target's weights.")
    draft_weights: Weights = Field("full", description="int8 and int4 round those of draft models.")
    kv_dtype: KvDtype = Field("auto", description="fp8 keeps the target's keys and values in 8 bits.")
    draft_kv_dtype: KvDtype = Field("auto", description="fp8: the same for draft models.")
    context_length: int = Field(
        0, ge=0, description="Most tokens of a sequence, of both models; 0: the models' own limits."
    )
    draft_skip_layers: str = Field(
        "", description="Layers to leave out of a target that drafts for itself, such as 4-9."
    )
    host: str = Field("127.0.0.1", description="Address that the orchestrator listens on; 0.0.0.0 for all.")
    port: Port = Field(7700, description="Port of the orchestrator; 0: a free one.")
    http_port: OptionalPort = Field(
        8000,
        description="Port of the OpenAI API; 0: a free one, -1: none. Unless set, another if 8000 is taken.",
    )
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16, of both models.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    draft_device: str = Field("", description="Device of the draft; empty: as device.")
    drafts: Positive = Field(1, le=MAX_REPLICAS, description="Draft replicas of each kind.")
    verifies: Positive = Field(1, le=MAX_REPLICAS, description="Verify replicas.")
    threads: Threads = Field(1, description="Torch threads of each replica.")
    tensor_parallel: Positive = Field(1, description="Processes that share each layer of the target.")
    cpu_backend: Literal["auto", "amx", "avx512", "avx2", "onednn"] = Field(
        "auto", description="Kernels that multiply on the CPU."
    )
    deterministic: bool = Field(False, description="The target's bits never depend on the batch.")
    cpus: Literal["auto", "off"] = Field(
        "auto",
        description="auto: if there are enough, replicas have cores of their own; those of drafts also run "
        "the orchestrator and help the target.",
    )
    metrics_port: OptionalPort = Field(
        -1,
        description="Prometheus page of the orchestrator; replicas take free ports. 0 picks one, -1: none.",
    )


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `outrider serve <service> <arguments>`."""

    name: str
    service: str
    arguments: tuple[str, ...]
    cores: tuple[int, ...] = ()
    """Cores that the process is pinned to; empty: it is not pinned."""
    sockets: tuple[int, ...] = ()
    """File descriptors that the process gets from its parent."""


def plan_replicas(resolved: Resolved[UpConfig], cores: list[int], gpu: bool) -> list[ChildSpec]:
    """The verify and draft processes; only settings that were given are passed on, so that the settings
    file still counts for the others.

    Raises:
        ConfigError: no target was named, or layers are to be skipped and the target is not a draft.
    """
    config = resolved.config
    if not config.target:
        raise ConfigError("--target: name the target model, a folder or a hub id")
    if config.draft_skip_layers and config.target not in config.draft:
        raise ConfigError(f"--draft-skip-layers: is for the target as a draft; add --draft {config.target}")
    drafts = 0 if NONE in config.draft else config.drafts * len(config.draft)
    names = [f"verify-{i}" for i in range(config.verifies)] + [f"draft-{i}" for i in range(drafts)]
    on_cpu = config.device == "cpu" or (config.device == "auto" and not gpu)
    pinned = config.cpus == "auto" and on_cpu
    sizes = [config.threads * (1 if _is_draft(name) else config.tensor_parallel) for name in names]
    shares = share_cores(cores, sizes) if pinned else [()] * len(names)
    helpers = [core for name, share in zip(names, shares, strict=True) if _is_draft(name) for core in share]
    if pinned and not drafts:
        helpers = cores[sum(sizes) :][: config.threads]
    if config.tensor_parallel > 1:
        helpers = []
    return [_replica(resolved, name, share, helpers) for name, share in zip(names, shares, strict=True)]


def plan_orchestrator(
    resolved: Resolved[UpConfig], replicas_file: str, replicas: Sequence[ChildSpec], cores: list[int]
) -> ChildSpec:
    """The orchestrator, which reads the replicas' endpoints from a file."""
    config = resolved.config
    arguments = ["--host", config.host, "--port", str(config.port), "--replicas-file", replicas_file]
    arguments.append("--require-fit")
    arguments += _passed_on(resolved, "drafts_per_session", "collect", "collect_share", "collect_max_mb")
    if config.metrics_port >= 0:
        arguments += ["--metrics-port", str(config.metrics_port)]
    arguments += _spare(replicas, cores)
    return ChildSpec("orchestrator", "orchestrator", (*arguments, *_common(resolved)))


def plan_gateway(
    resolved: Resolved[UpConfig], listener: int, replicas: Sequence[ChildSpec], cores: list[int]
) -> ChildSpec:
    """The HTTP gateway, on a socket that is already bound; its orchestrator's address is known later."""
    arguments = ["--listen-fd", str(listener), *_spare(replicas, cores), *_common(resolved)]
    arguments += _passed_on(resolved, "tool_call_parser", "reasoning_parser")
    return ChildSpec("gateway", "gateway", tuple(arguments), sockets=(listener,))


def share_cores(cores: list[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Different cores for each process, as many as its size; none (not pinned) for all if there are too few
    cores."""
    if sum(sizes) > len(cores):
        return [()] * len(sizes)
    ends = list(accumulate(sizes))
    return [tuple(cores[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _spare(replicas: Sequence[ChildSpec], cores: list[int]) -> list[str]:
    """Flags that keep a process off the cores of the verify replicas, if any other cores are left."""
    taken = {core for spec in replicas if spec.service == "verify" for core in spec.cores}
    left = [core for core in cores if core not in taken]
    return ["--cpus", ",".join(map(str, left))] if taken and left else []


def _is_draft(name: str) -> bool:
    return name.startswith("draft-")


def _replica(
    resolved: Resolved[UpConfig], name: str, cores: tuple[int, ...], helpers: Sequence[int]
) -> ChildSpec:
    """A replica on `cores`; a target's long steps get help on the cores `helpers`."""
    config = resolved.config
    service, _, number = name.partition("-")
    device = config.draft_device if service == "draft" and config.draft_device else config.device
    arguments = ["--name", name, "--host", "127.0.0.1", "--port", "0", *_model(config, service, int(number))]
    if device != "auto":
        arguments += ["--device", device]
    arguments += _passed_on(
        resolved,
        "dtype",
        "threads",
        "cpu_backend",
        "context_length",
        *(["deterministic", "tensor_parallel"] if service == "verify" else []),
    )
    if cores:
        arguments += ["--cpus", ",".join(map(str, cores))]
    if helpers and not _is_draft(name):
        arguments += ["--helper-cpus", ",".join(map(str, helpers))]
    if config.metrics_port >= 0:
        arguments += ["--metrics-port", "0"]
    return ChildSpec(name, service, (*arguments, *_common(resolved)), cores)


def _model(config: UpConfig, service: str, number: int) -> list[str]:
    if service == "verify":
        return ["--model", config.target, *_rounded(config.weights, config.kv_dtype)]
    draft = config.draft[number // config.drafts]
    if draft == LOOKUP:
        return ["--kind", "lookup"]
    if draft == MTP:
        return ["--kind", "mtp", "--model", config.target]
    flags = ["--kind", "model", "--model", draft, "--target", config.target]
    flags += _rounded(config.draft_weights, config.draft_kv_dtype)
    skips = config.draft_skip_layers and draft == config.target
    return flags + (["--skip-layers", config.draft_skip_layers] if skips else [])


def _rounded(weights: Weights, kv_dtype: KvDtype) -> list[str]:
    flags = ["--weights", weights] if weights != "full" else []
    return flags + (["--kv-dtype", kv_dtype] if kv_dtype != "auto" else [])


def _common(resolved: Resolved[UpConfig]) -> list[str]:
    return _passed_on(resolved, "grace_seconds", "log_level", "log_format")


def _passed_on(resolved: Resolved[UpConfig], *names: str) -> list[str]:
    return [word for name in names if resolved.given(name) for word in _flag(resolved.config, name)]


def _flag(config: UpConfig, name: str) -> tuple[str, ...]:
    value, flag = getattr(config, name), flag_of(name)
    if isinstance(value, bool):
        return (flag if value else flag.replace("--", "--no-", 1),)
    return (flag, str(value))
