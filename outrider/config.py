"""Settings of every process: frozen, validated, documented.

Precedence is flag > environment > file > default. The environment variable of a field is its service's
prefix and its name, such as `OUTRIDER_VERIFY_MAX_SESSIONS`; a file is TOML with one table per service.
`outrider.cli.settings` reads them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from outrider.layer_lists import parse_layers
from outrider.protocol.allowance import MAX_TREE_NODES
from outrider.protocol.messages import MAX_STEP_NODES


def checked_device(text: str) -> str:
    """Return the name of a device.

    Raises:
        ValueError: it is none; says what it must be.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return text


def checked_layers(text: str) -> str:
    """Return a list of layers in text.

    Raises:
        ValueError: it is none; says what it must be.
    """
    parse_layers(text)
    return text


Port = Annotated[int, Field(ge=0, le=65535)]
OptionalPort = Annotated[int, Field(ge=-1, le=65535)]
Positive = Annotated[int, Field(gt=0)]
MAX_THREADS = 1024
"""Most threads of one process: more than the cores of the largest machines."""
MAX_CONTEXT = 2**31
"""Most tokens of a sequence: messages have 32 bits for lengths."""
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["full", "int8", "int4"]
KvDtype = Literal["auto", "fp8"]
CpuBackend = Literal["auto", "amx", "avx512", "avx2", "onednn"]
Device = Annotated[str, AfterValidator(checked_device)]
Layers = Annotated[str, AfterValidator(checked_layers)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]
"""Origin of a page in a browser: scheme, host and perhaps port; or * for all."""
TraceDetail = Literal["none", "slow", "all"]


class Settings(BaseModel):
    """Base: no unknown names, finite numbers, no changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Settings):
    """Settings of everything that runs until it is told to end."""

    grace_seconds: float = Field(30.0, ge=0, description="Longest wait for running work after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, otherwise json."
    )


class ProcessConfig(RunConfig):
    """Settings of every process that serves."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Port = Field(0, description="gRPC port; 0: a free one.")
    cpus: str = Field("", description="Cores to pin this process to, such as 0-3; empty: any.")
    tls_cert: str = Field("", description="PEM certificate chain of this server; empty: plaintext.")
    tls_key: str = Field("", description="PEM private key of tls_cert.")
    tls_ca: str = Field("", description="PEM authorities of the certificates that clients must show.")


class ServiceConfig(ProcessConfig):
    """Settings of every gRPC service."""

    metrics_port: OptionalPort = Field(-1, description="Prometheus port; 0: a free one, -1: none.")
    health_port: OptionalPort = Field(-1, description="Plaintext port for probes; 0: a free one, -1: none.")
    name: str = Field("", description="Name in logs and metrics; empty: host and port.")
    max_request_mb: Positive = Field(64, description="Largest message of a caller, in MiB.")
    max_connection_seconds: float = Field(
        0.0,
        ge=0,
        description="Longest life of a connection; callers then look up replicas again; 0: no limit.",
    )
    reflection: bool = Field(False, description="Serve gRPC reflection.")


class EngineConfig(ServiceConfig):
    """Settings of services that run a model."""

    max_request_mb: Positive = Field(16, description="Largest message of an orchestrator, in MiB.")
    model: str = Field("", description="Folder or hub id of the model.")
    dtype: Dtype = Field("auto", description="Arithmetic of the weights; auto is the checkpoint's own.")
    weights: Weights = Field(
        "full",
        description="int8 or int4 rounds linear layers at load; full: as stored.",
    )
    kv_dtype: KvDtype = Field(
        "auto",
        description="fp8: keys and values in 8 bits, for 16-bit models on GPUs; auto: the model's.",
    )
    device: Device = Field("auto", description="auto, cpu, cuda or cuda:N.")
    threads: Threads = Field(
        0, description="Threads on the CPU; 0: one for each core that it may use, at most OMP_NUM_THREADS."
    )
    cpu_backend: CpuBackend = Field("auto", description="CPU kernels; auto: the fastest on this processor.")
    helper_cpus: str = Field(
        "", description="Cores that help with long steps in addition to other work; empty: none."
    )
    max_sessions: Positive = Field(64, description="Most sessions at once.")
    kv_tokens: int = Field(
        0,
        ge=0,
        description="Tokens of KV memory; 0: 65536, or what half of the free memory holds.",
    )
    prefix_cache: bool = Field(True, description="Reuse keys and values of shared prefixes.")
    context_length: int = Field(
        0, ge=0, le=MAX_CONTEXT, description="Most tokens of a sequence; 0: the model's own limit."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")


class VerifyConfig(EngineConfig):
    """The verify service."""

    max_step_tokens: Positive = Field(512, description="Most tokens of one forward, prefill chunks included.")
    max_nodes: Positive = Field(
        32, le=MAX_STEP_NODES, description="Most candidates of a session in one step."
    )
    lookup: bool = Field(True, description="Also propose candidates by prompt lookup.")
    lease_seconds: float = Field(60.0, gt=0, le=1e9, description="How long unused keys and values are kept.")
    deterministic: bool = Field(
        False, description="A token's bits never depend on its batch; refused where library kernels compute."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: defaults of requests from the model's generation_config.json."
    )
    served_name: str = Field("", description="Model name on the wire; empty: the last part of `model`.")
    tensor_parallel: Positive = Field(
        1, description="Processes that share each layer, each with `threads` or a GPU."
    )
    tensor_parallel_rank: int = Field(
        0, ge=0, description="Rank of this process, if each is started by itself; 0 serves."
    )
    tensor_parallel_address: str = Field(
        "", description="host:port of rank 0, if each is started by itself; empty: it starts them here."
    )


class DraftConfig(EngineConfig):
    """The draft service."""

    kind: Literal["model", "eagle", "mtp", "lookup"] = Field(
        "model",
        description="Draft model, EAGLE-3 head (also recognised under model), MTP layer of the target that "
        "`model` names, or prompt lookup.",
    )
    target: str = Field("", description="Folder or hub id of an EAGLE head's target.")
    skip_layers: Layers = Field("", description="Layers to leave out, from 0, such as 2,5-7; empty: none.")
    shadow: bool = Field(
        False,
        description="Proposals are compared, not verified, until `outrider drafts promote`.",
    )
    reload_model: bool = Field(
        False, description="Load new weights when files of `model` change; meanwhile, both are in memory."
    )
    tokenizer: str = Field("", description="Tokenizer for kind=lookup; empty: any target.")
    expansions: Positive = Field(8, description="Most nodes expanded in one forward.")
    children: Positive = Field(8, description="Most children of one node.")
    max_nodes: Positive = Field(256, le=MAX_TREE_NODES, description="Most nodes of a session's tree.")
    max_depth: Positive = Field(24, description="Deepest node below the last committed token.")

    def tokenizer_of(self, kind: str) -> str:
        """Return the folder or hub id of the model whose tokenizer a draft of this kind has."""
        return self.target if kind == "eagle" else self.model


class CallerConfig(Settings):
    """Settings of processes that call other services."""

    tls_client_cert: str = Field("", description="PEM certificate shown to services.")
    tls_client_key: str = Field("", description="PEM private key of tls_client_cert.")
    tls_client_ca: str = Field("", description="PEM authorities of these services; empty: plaintext to them.")


class CollectConfig(Settings):
    """Settings for the tokens that are kept to train drafts."""

    collect: str = Field(
        "",
        description="Folder to keep tokens in, also prompts, for `outrider distill`; empty: none are kept.",
    )
    collect_share: float = Field(0.05, gt=0, le=1, description="Share of the requests that are collected.")
    collect_max_mb: Positive = Field(
        256, description="Most MiB of all collected files; the oldest are deleted first."
    )


class OrchestratorConfig(ServiceConfig, CallerConfig, CollectConfig):
    """The orchestrator."""

    port: Port = Field(7700, description="gRPC port; 0: a free one.")
    max_request_mb: Positive = Field(8, description="Largest message of a caller, in MiB.")
    verify: tuple[str, ...] = Field(
        (), description="Verify replicas: host:port, or dns:name:port, which is polled."
    )
    draft: tuple[str, ...] = Field((), description="Draft replicas, likewise.")
    require_fit: bool = Field(
        False, description="A draft that does not fit the target ends the process; off: it is left out."
    )
    replicas_file: str = Field(
        "", description="File with lines 'verify host:port' or 'draft host:port', watched."
    )
    discovery_seconds: float = Field(2.0, gt=0, description="Period of DNS polls and replica checks.")
    max_running: int = Field(
        0, ge=0, description="Most continuations at once; 0: as many as verify replicas have room for."
    )
    max_queued: int = Field(256, ge=0, description="Most requests that wait to begin.")
    default_max_tokens: int = Field(
        0, ge=0, description="max_tokens of requests that set none; 0: the context length."
    )
    max_priority: int = Field(100, ge=-100, le=100, description="Highest priority of a request.")
    default_deadline_seconds: float = Field(600.0, gt=0, description="Deadline of requests that have none.")
    draft_open_timeout_ms: float = Field(
        2000.0,
        gt=0,
        description="Longest wait for a draft to open, and longest silence of one that is wanted.",
    )
    recovery_seconds: float = Field(30.0, ge=0, description="Longest wait for another verify replica.")
    drafts_per_session: int = Field(
        1,
        ge=1,
        le=8,
        description="Drafts that one session uses at once.",
    )
    shadow_share: float = Field(
        0.1, ge=0, le=1, description="Share of the sessions that a shadow also drafts for."
    )
    promote_shadows: bool = Field(
        False, description="A shadow that is better automatically changes places with a draft replica."
    )
    breaker_failures: Positive = Field(3, description="Failures in a row that keep a replica out.")
    breaker_seconds: float = Field(5.0, gt=0, description="How long a replica is kept out.")
    draft_sessions_per_replica: int = Field(
        0, ge=0, description="Sessions that a draft replica serves well, for scaling; 0: learned."
    )
    auth_tokens_file: str = Field(
        "", description="File of bearer tokens, one per line, watched; empty: none needed."
    )
    client_rate: float = Field(
        0.0, ge=0, le=1e6, description="Requests per second of one client (token or address); 0: no limit."
    )
    client_burst: Positive = Field(32, description="Requests that a limited client may make at once.")
    request_log: bool = Field(True, description="Log a line for each request, without its text.")
    trace_detail: TraceDetail = Field("all", description="Sampled requests whose steps have spans.")
    trace_slow_seconds: float = Field(10.0, ge=0, description="Least duration of a slow request.")


class OutputConfig(Settings):
    """How the model writes its answers, for the gateway."""

    tool_call_parser: Literal["none", "hermes", "llama3", "qwen3_coder"] = Field(
        "none", description="How the model writes tool calls; none: refused."
    )
    reasoning_parser: Literal["none", "think"] = Field(
        "none",
        description="think: what a model writes between <think> and </think> is no part of its answer.",
    )


class GatewayConfig(ProcessConfig, CallerConfig, OutputConfig):
    """The HTTP gateway."""

    port: Port = Field(8000, description="HTTP port; 0: a free one.")
    listen_fd: int = Field(-1, ge=-1, description="Bound socket to use instead of host and port; -1: none.")
    orchestrator: str = Field(
        "127.0.0.1:7700",
        description="Orchestrators: host:port, or another gRPC name, such as dns:name:port.",
    )
    max_request_mb: Positive = Field(8, description="Largest body of a request, in MiB.")
    deadline_seconds: float = Field(600.0, gt=0, description="Longest time of a request.")
    allowed_origins: tuple[Origin, ...] = Field(
        (), description="Origins of browser pages that may call, such as https://chat.example; *: all."
    )
    page: bool = Field(True, description="Serve the web page at /.")
    response_metrics: bool = Field(False, description="Answers carry vLLM's `metrics`.")
    metrics_port: OptionalPort = Field(
        -1, description="Plaintext port for probes and Prometheus; 0: a free one, -1: none."
    )
    auth_tokens_file: str = Field(
        "", description="File of bearer tokens, one per line; empty: the orchestrator checks them."
    )
