"""The messages between the services, as plain values.

These types mirror `protos/outrider` and know nothing of protobuf; `outrider.protocol.wire` converts. The
terms are those of the field: a *node* is a proposed token, a *token block* a group of nodes sent
together, a *verdict* the tokens that one verify step committed, *accepted* tokens those committed because
a node matched, and the *bonus* the one extra token that every step yields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from outrider.protocol.constraint import Constraint
from outrider.protocol.errors import InvalidRequest

SEEDS = 2**64
"""Number of seeds; the seeds of a request's continuations go on modulo it."""
MAX_ENTRIES = {"logit_bias": 1024, "stop": 16, "stop_token_ids": 256}
"""Most entries that the sampling parameters with several entries may have."""
MAX_CONTINUATIONS = 16
"""Most continuations of one request."""
MAX_STEP_NODES = 256
"""Most nodes of a step; also most nodes that are reported to a caller with `record_steps`."""


class FinishReason(IntEnum):
    """How a generation ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class Mode(IntEnum):
    """How drafting and verification work together; the numbers are those of the wire."""

    AUTO = 1
    SEQUENTIAL = 2
    OFF = 3


class Origin(IntEnum):
    """Who proposed a token first; the numbers are those of the wire."""

    TARGET = 1
    """The target itself: nobody proposed the token, or it was not verified in the step that committed it."""
    DRAFT = 2
    LOOKUP = 3
    GRAMMAR = 4
    """A grammar that allowed no other token."""
    PREDICTION = 5
    """The caller's prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Resolved sampling parameters; the defaults are greedy decoding without penalties.

    Raises:
        InvalidRequest: a value is out of its range; `field` names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    """Seed of the sampling noise, an unsigned 64-bit number."""
    max_tokens: int | None = None
    """Most tokens to generate; None: up to the context length."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report in addition to the committed token; None: no log probabilities."""
    n: int = 1
    constraint: Constraint | None = None
    """The constraint on the generated text."""
    include_stop: bool = False
    """True when the stop string, or the token, that ends a text stays in it."""
    keep_special_tokens: bool = False
    """True when special tokens are spelled in the text."""
    prompt_logprobs: int | None = None
    """The same as `logprobs`, for the tokens of the prompt."""

    def end_length(self, prompt_length: int) -> float:
        """Length, prompt included, at which the text ends; infinite if only the context limits it."""
        return inf if self.max_tokens is None else prompt_length + self.max_tokens

    def end_tokens(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a text of a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)

    def __post_init__(self) -> None:
        _within("sampling.temperature", self.temperature, 0.0, 100.0)
        _within("sampling.top_p", self.top_p, 1e-6, 1.0)
        _within("sampling.top_k", self.top_k, 0, 2**31 - 1)
        _within("sampling.min_p", self.min_p, 0.0, 1.0)
        _within("sampling.repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in MAX_ENTRIES:
            check_entries(name, len(getattr(self, name)))
        for token, bias in self.logit_bias.items():
            _within(f"sampling.logit_bias[{token}]", bias, -100.0, 100.0)
        _within("sampling.seed", self.seed, 0, SEEDS - 1)
        if self.max_tokens is not None:
            _within("sampling.max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("sampling.min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("sampling.min_tokens", f"must not exceed max_tokens {self.max_tokens}")
        for index, text in enumerate(self.stop):
            _within(f"sampling.stop[{index}]", len(text), 1, 1024, "characters")
        if self.logprobs is not None:
            _within("sampling.logprobs", self.logprobs, 0, 20)
        if self.prompt_logprobs is not None:
            _within("sampling.prompt_logprobs", self.prompt_logprobs, 0, 20)
        _within("sampling.n", self.n, 1, MAX_CONTINUATIONS)

    @property
    def greedy(self) -> bool:
        """True when the token is the plain argmax and no noise is drawn."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when logits depend on the tokens before them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check_entries(name: str, entries: int) -> None:
    """Check that a list among the sampling parameters is short enough; `name` is a key of `MAX_ENTRIES`.

    Raises:
        InvalidRequest: the list is too long.
    """
    _within(f"sampling.{name}", entries, 0, MAX_ENTRIES[name], "entries")


def _within(name: str, value: float, low: float, high: float, counted: str = "") -> None:
    """Check a number; `counted` is the unit in the error text; if empty, the number is the field's value."""
    if not low <= value <= high:  # also refuses NaN
        said = [f"{one:.16g}" for one in (low, high, value)]
        must, unit = ("must have", f" {counted}") if counted else ("must be", "")
        raise InvalidRequest(name, f"{must} between {said[0]} and {said[1]}{unit}, not {said[2]}")


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Nodes proposed together, as columns of equal length; node i has the id `first_id + i`.

    A parent is an earlier node id when >= 0, and minus the committed length n when < 0: the node then
    proposes the token at position n. `acceptances` are conditional on the parent being chosen.
    """

    first_id: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    acceptances: tuple[float, ...]
    ready: bool = False
    base_length: int = 0
    traceparent: str = ""
    expand_start_unix_nano: int = 0
    expand_micros: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def empty(self) -> bool:
        """True if it only shows that the draft is at work: it has no nodes and is not marked ready."""
        return not (self.tokens or self.ready)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a committed token, and the best alternatives as (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of one verify step in microseconds, and the start of its forward in Unix nanoseconds."""

    forward_start_unix_nano: int = 0
    queue_micros: int = 0
    forward_micros: int = 0
    sample_micros: int = 0
    idle_micros: int = 0


@dataclass(frozen=True, slots=True)
class StepNodes:
    """The nodes that a step verified, as columns of equal length; parents come before children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of each node's parent; -1 if the parent is the last committed token."""
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that one verify step committed for one session: accepted nodes, then the bonus token."""

    step: int
    base_length: int
    tokens: tuple[int, ...]
    verified: int = 0
    accepted: int = 0
    depth: int = 0
    hit: bool = False
    lookup_verified: int = 0
    batch_size: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()
    times: StepTimes = StepTimes()
    finish_reason: FinishReason = FinishReason.NONE
    node_price: float = 0.0
    """Cost of verifying one node at present, as the tokens that the replica could commit in that time."""
    prompt_tokens: int = 0
    """Prompt tokens that the step computed, over all sessions."""
    draft_wanted: bool = True
    """False if the session should have no draft at present; if it has one, that draft pauses."""
    next_step_micros: int = 0
    """Microseconds until the step after the one that begins now, for which blocks must arrive by then."""
    take_turns: bool = False
    """True if the draft should stop after a ready block until the next verdict, because the target uses its
    cores."""
    nodes: StepNodes | None = None
    """The verified nodes, if the session was opened with `record_steps`."""
    predicted: int = 0
    """Number of verified nodes that the caller's prediction proposed."""
    predicted_accepted: int = 0
    """Number of them that were accepted."""
    features: bytes = b""
    """Rows of `outrider.engine.features` for the last tokens, if the session asked for them. The row of a
    token holds the inputs of the target's layers at the token before it."""


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """Features of the last tokens of a text: rows for those from `position` on, as in `Verdict.features`."""

    position: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens from `position` on."""

    position: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Opaque, leased reference to a sequence's keys and values on one replica."""

    owner: str
    incarnation: str
    id: str
    length: int
    digest: bytes
    expires_unix_ms: int


MAX_DRAFT_NAME = 64
"""Most characters of a draft's name, which is a label of metrics."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describes what a draft or verify replica serves."""

    model: str
    vocabulary_hash: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    replica: str = ""
    incarnation: str = ""
    max_sessions: int = 0
    sessions: int = 0
    kind: str = "target"
    dtype: str = ""
    device: str = ""
    pages: int = 0
    pages_free: int = 0
    arithmetic: str = ""
    """Name of the arithmetic: replicas with the same one compute the same bits for a token."""
    arithmetic_reason: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults for sampling parameters that a request leaves out, by the names of `SamplingParams`."""
    version: str = ""
    """Identifies the weights: for a draft a short hash of their files, for a target a fingerprint of weights,
    tokenizer and chat template."""
    shadow: bool = False
    """True if the draft's proposals are only compared with the target's text, not verified."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose inputs a draft reads, ascending."""
    hidden_size: int = 0
    """Width of the target's layers; for a draft, the width that it expects of them."""
    num_layers: int = 0
    """Number of layers of a target."""
    kv_layout: str = ""
    """Verify replicas with the same layout can exchange keys and values; empty: they cannot be moved."""

    @property
    def draft_name(self) -> str:
        """Name of a draft where versions are compared: its `version`, or its kind if it has no weights."""
        return (self.version or self.kind)[:MAX_DRAFT_NAME]

    def reads(self, layers: Collection[int]) -> bool:
        """Whether a draft reads features, and only of these layers."""
        return bool(self.feature_layers) and set(self.feature_layers) <= set(layers)


class VerifyPolicy(IntEnum):
    """When the target may run ahead of the draft; the numbers are those of the wire."""

    PIPELINED = 1
    SEQUENTIAL = 2
    OFF = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVerify:
    """Opens a session on a verify replica; `token_ids` follow the tokens of `kv_handle` if that is given."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    kv_handle: KvHandle | None = None
    policy: VerifyPolicy = VerifyPolicy.PIPELINED
    max_nodes: int = 0
    vocabulary_hash: str = ""
    first_step: int = 0
    traceparent: str = ""
    task: str = ""
    priority: int = 0
    lookup: bool = True
    record_steps: bool = False
    """True if verdicts report which nodes were verified."""
    prediction: tuple[int, ...] = ()
    """Token ids that the generated text will resemble; empty: no prediction."""
    first_prompt_logprob: int = 1
    """The first position of the prompt whose log probability is wanted, if any are."""
    seconds_per_token: float = 0.0
    """Seconds per token that the caller needs; 0: none."""
    feature_layers: tuple[int, ...] = ()
    """Target layers whose inputs are sent with the tokens; empty: none."""
    all_token_ids: bool = False
    """True if `token_ids` are all committed tokens although a handle is given."""

    @property
    def covered(self) -> int:
        """Number of committed tokens before `token_ids`: those that the handle covers."""
        return 0 if self.kv_handle is None or self.all_token_ids else self.kv_handle.length


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft:
    """Opens a session on a draft replica with all committed tokens."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    pipelined: bool = True
    max_nodes: int = 0
    max_depth: int = 0
    vocabulary_hash: str = ""
    first_node_id: int = 0
    first_step: int = 0
    traceparent: str = ""
    task: str = ""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose features come with verdicts."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica admitted a session; `cached_length` tokens needed no prefill."""

    replica: str
    incarnation: str
    cached_length: int = 0
    draft_wanted: bool = True
    """From a verify replica: whether the session should have a draft."""
