"""Settings of `outrider up`, and the processes that they call for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from pydantic import Field

from outrider.cli.settings import Resolved, flag_of
from outrider.config import (
    MAX_CONTEXT,
    CollectConfig,
    CpuBackend,
    Device,
    Dtype,
    KvDtype,
    Layers,
    OptionalPort,
    OutputConfig,
    Port,
    Positive,
    RunConfig,
    Threads,
    Weights,
)
from outrider.cores import Cores
from outrider.protocol.errors import ConfigError

LOOKUP = "lookup"
MTP = "mtp"
NONE = "none"
DRAFTS_SHARE = 0.25
"""Share of the cores for drafts that are models. If speed grows with the cores, a draft with a tenth of the
target's weights can then propose three tokens while the target verifies; this was not measured."""
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
    draft_weights: Weights = Field("full", description="int8 and int4 round the weights of draft models.")
    kv_dtype: KvDtype = Field("auto", description="fp8 keeps the target's keys and values in 8 bits.")
    draft_kv_dtype: KvDtype = Field(
        "auto", description="fp8 keeps the keys and values of draft models in 8 bits."
    )
    context_length: int = Field(
        0,
        ge=0,
        le=MAX_CONTEXT,
        description="Most tokens of a sequence, of both models; 0: the models' own limits.",
    )
    draft_skip_layers: Layers = Field(
        "", description="Layers to leave out of a target that drafts for itself, such as 4-9."
    )
    host: str = Field("127.0.0.1", description="Address that the orchestrator listens on; 0.0.0.0 for all.")
    port: Port = Field(7700, description="Port of the orchestrator; 0: a free one.")
    http_port: OptionalPort = Field(
        8000,
        description="Port of the OpenAI API; 0: a free one, -1: none. Unless set, another if 8000 is taken.",
    )
    dtype: Dtype = Field("auto", description="Arithmetic of both models; auto: each one's own.")
    device: Device = Field("auto", description="auto, cpu, cuda or cuda:N.")
    draft_device: Device | Literal[""] = Field("", description="Device of the draft; empty: as device.")
    drafts: Positive = Field(1, le=MAX_REPLICAS, description="Draft replicas of each kind.")
    verifies: Positive = Field(1, le=MAX_REPLICAS, description="Verify replicas.")
    threads: Threads = Field(
        0, description="Threads of each replica on the CPU; 0: the cores are shared out among them."
    )
    tensor_parallel: Positive = Field(1, description="Processes that share each layer of the target.")
    cpu_backend: CpuBackend = Field("auto", description="Kernels that multiply on the CPU.")
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


def plan_replicas(resolved: Resolved[UpConfig], cores: Cores, gpu: bool) -> list[ChildSpec]:
    """The verify and draft processes; only settings that were given are passed on, so that the settings
    file still counts for the others.

    Raises:
        ConfigError: no target was named, layers are to be skipped and the target is not a draft, or there
            are drafts beside none.
    """
    config = resolved.config
    if not config.target:
        raise ConfigError("--target: name the target model, a folder or a hub id")
    if config.draft_skip_layers and config.target not in config.draft:
        raise ConfigError(f"--draft-skip-layers: is for the target as a draft; add --draft {config.target}")
    if NONE in config.draft and len(config.draft) > 1:
        raise ConfigError(f"--draft: {NONE} means that there are no drafts; leave it or the others out")
    on_cpu = config.device == "cpu" or (config.device == "auto" and not gpu)
    pinned = config.cpus == "auto" and on_cpu
    threads = share_threads(config, cores.threads)
    sizes = [count * (1 if _is_draft(name) else config.tensor_parallel) for name, count in threads.items()]
    shares = share_cores(cores.numbers, sizes) if pinned else [()] * len(sizes)
    helpers = [core for name, share in zip(threads, shares, strict=True) if _is_draft(name) for core in share]
    if any(shares) and not helpers:
        helpers = list(cores.numbers[sum(sizes) : cores.threads][: threads["verify-0"]])
    if config.tensor_parallel > 1:
        helpers = []
    if not config.threads and (any(shares) or not on_cpu):  # they count their cores themselves
        threads = dict.fromkeys(threads, 0)
    return [
        _replica(resolved, name, count, share, helpers)
        for (name, count), share in zip(threads.items(), shares, strict=True)
    ]


def plan_orchestrator(
    resolved: Resolved[UpConfig], replicas_file: str, replicas: Sequence[ChildSpec], cores: Cores
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
    resolved: Resolved[UpConfig], listener: int, replicas: Sequence[ChildSpec], cores: Cores
) -> ChildSpec:
    """The HTTP gateway, on a socket that is already bound; its orchestrator's address is known later."""
    arguments = ["--listen-fd", str(listener), *_spare(replicas, cores), *_common(resolved)]
    arguments += _passed_on(resolved, "tool_call_parser", "reasoning_parser")
    return ChildSpec("gateway", "gateway", tuple(arguments), sockets=(listener,))


def share_threads(config: UpConfig, count: int) -> dict[str, int]:
    """How many threads each replica has, by name: as many as were asked for, or a share of `count`. One is
    left for the orchestrator where no draft runs beside it."""
    kinds = _kinds(config)
    models = sum(kind != LOOKUP for kind in kinds)
    of_model = max(1, int(DRAFTS_SHARE * count) // max(1, models))
    of_drafts = [1 if kind == LOOKUP else of_model for kind in kinds]
    left = count - (sum(of_drafts) or 1)
    of_verify = max(1, left // (config.verifies * config.tensor_parallel))
    threads = {f"verify-{number}": of_verify for number in range(config.verifies)}
    threads |= {f"draft-{number}": own for number, own in enumerate(of_drafts)}
    return dict.fromkeys(threads, config.threads) if config.threads else threads


def share_cores(cores: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Different cores for each process, as many as its size; none (not pinned) for all if there are too few
    cores."""
    if sum(sizes) > len(cores):
        return [()] * len(sizes)
    ends = list(accumulate(sizes))
    return [tuple(cores[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _spare(replicas: Sequence[ChildSpec], cores: Cores) -> list[str]:
    """Flags that keep a process off the cores of the verify replicas, if any other cores are left."""
    taken = {core for spec in replicas if spec.service == "verify" for core in spec.cores}
    left = [core for core in cores.numbers if core not in taken]
    return ["--cpus", ",".join(map(str, left))] if taken and left else []


def _kinds(config: UpConfig) -> list[str]:
    """The kind or model of each draft replica."""
    kinds = () if NONE in config.draft else config.draft
    return [kind for kind in kinds for _ in range(config.drafts)]


def _is_draft(name: str) -> bool:
    return name.startswith("draft-")


def _replica(
    resolved: Resolved[UpConfig],
    name: str,
    threads: int,
    cores: tuple[int, ...],
    helpers: Sequence[int],
) -> ChildSpec:
    """A replica with `threads`, or with as many as it finds best on its `cores` or device if that is 0; a
    target's long steps get help on the cores `helpers`."""
    config = resolved.config
    service, _, number = name.partition("-")
    device = config.draft_device if service == "draft" and config.draft_device else config.device
    arguments = ["--name", name, "--host", "127.0.0.1", "--port", "0", *_model(config, service, int(number))]
    if device != "auto":
        arguments += ["--device", device]
    arguments += _passed_on(
        resolved,
        "dtype",
        "cpu_backend",
        "context_length",
        *(["deterministic", "tensor_parallel"] if service == "verify" else []),
    )
    arguments += ["--threads", str(threads)] if threads else []
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
    draft = _kinds(config)[number]
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
