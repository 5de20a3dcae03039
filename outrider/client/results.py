"""The results of a request, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FinishReason = Literal["", "stop", "length"]
"""Why a text ended: `stop` at a stop string or token, `length` at max_tokens or the context's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the target, and those of the likeliest ones there."""

    token: int
    logprob: float
    spelling: bytes | None = None
    """What it stands for in UTF-8, of which it may be a part; None where the service cannot tell."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens, best first; their own `top` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An interval of work in the lane `draft`, `wire` or `verify`; its start is in Unix nanoseconds."""

    lane: str
    name: str
    start_ns: int
    duration_us: int
    step: int = 0
    nodes: int = 0
    accepted: int = 0

    @property
    def end_ns(self) -> int:
        """The end in Unix nanoseconds."""
        return self.start_ns + self.duration_us * 1000


Origin = Literal["", "target", "draft", "lookup", "grammar", "prediction"]
"""Who proposed a token first; `target`: nobody, or it was not verified in the step that committed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNode:
    """A candidate that a step verified."""

    token: int
    spelling: bytes | None
    """What it stands for in UTF-8, of which it may be a part; None where the service cannot tell."""
    parent: int | None
    """Index of its parent among the step's nodes; None if that is the last committed token."""
    origin: Origin
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one verify step did."""

    number: int
    nodes: tuple[StepNode, ...]
    """Parents come before children."""
    bonus: int | None
    """The token that the target chose after the accepted nodes; None if the text ended at one of them."""
    bonus_spelling: bytes | None
    timeline: tuple[TimelineEvent, ...]
    """The intervals since the previous step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one continuation."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were cached."""
    accepted_prediction_tokens: int = 0
    """Generated tokens that the prediction had proposed."""
    rejected_prediction_tokens: int = 0
    """Tokens of the prediction that were verified and rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The beginning of one continuation, with what is needed to resume it."""

    index: int
    request_id: str
    seed: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    model_version: str = ""
    """Version of the model's weights; empty if the service cannot tell."""
    prompt_end: str = ""
    """Last characters of a conversation's prompt, at most 64, special tokens included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and tokens of one continuation; `logprobs`, if asked for, has one entry per token.

    With `record_steps`, `origins` also has one entry per token, and the first chunk after each step has the
    `step`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: tuple[Origin, ...] = ()
    step: Step | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """The next log probabilities of the prompt, if asked for; they come before any new token. That of the
    first token, which follows nothing, is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """The end of one continuation."""

    index: int
    finish_reason: FinishReason
    stop: str
    """The stop string that ended it, if one did."""
    usage: Usage
    speculation: Mapping[str, float]
    """The counts of `SpeculationStats` in generation.proto; for a resumed stream, those of its last part."""
    seed: int
    model: str
    request_id: str
    session: bytes = b""
    """The session for the next turn; empty unless `keep_session` was set."""
    timeline: tuple[TimelineEvent, ...] = ()
    resumptions: int = 0
    """Number of times that the stream broke and was resumed."""
    accepted_histogram: tuple[int, ...] = ()
    """Number of steps that accepted 0, 1, 2, ... candidates, among those that verified any."""


Event: TypeAlias = Started | Chunk | Complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished continuation."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: Complete
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the prompt, the first of them 0; only the first continuation has them."""
    prompt_end: str = ""
    """Last characters of a conversation's prompt; see `Started`."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.end.finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return self.end.usage

    @property
    def seed(self) -> int:
        """Seed of its sampling noise: the same request with this seed generates the same tokens."""
        return self.end.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All continuations of a request, in order; the properties are those of the first."""

    generations: tuple[Generation, ...]

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.generations[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation."""
        return self.generations[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.generations[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts of the first continuation."""
        return self.generations[0].usage

    @property
    def session(self) -> bytes:
        """Session of the first continuation, for the next turn."""
        return self.generations[0].end.session


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an orchestrator serves."""

    model: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    text_prompts: bool
    """Prompts may be text."""
    chat_prompts: bool
    """Prompts may be conversations."""
    verify_replicas: int
    draft_replicas: int
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own values for sampling parameters that a request leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an orchestrator and the replicas behind it are."""

    running: int
    """Requests that have begun."""
    waiting: int
    """Requests that wait to begin."""
    places: int
    """Most continuations that may run at once."""
    free_places: int
    pages: int
    """Pages of KV memory; `pages_free` of them are free."""
    pages_free: int
    verify_replicas: int
    draft_replicas: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that a request may name."""

    name: str
    context_length: int
    vocabulary_size: int
    text_prompts: bool
    """Prompts may be text."""
    chat_prompts: bool
    """Prompts may be conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The token ids of a prompt."""

    token_ids: tuple[int, ...]
    context_length: int
    """Most tokens of prompt and output together."""

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(slots=True)
class Collected:
    """Assembles the events of a stream to a result."""

    _chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    _ends: dict[int, Complete] = field(default_factory=dict)
    _prompt_ends: dict[int, str] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Chunk():
                self._chunks.setdefault(event.index, []).append(event)
            case Complete():
                self._ends[event.index] = event
            case Started():
                self._prompt_ends[event.index] = event.prompt_end

    def result(self) -> Result:
        """The whole result, once every continuation has ended."""
        return Result(generations=tuple(self._generation(index) for index in sorted(self._ends)))

    def _generation(self, index: int) -> Generation:
        chunks = self._chunks.get(index, [])
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
            end=self._ends[index],
            prompt_logprobs=tuple(one for chunk in chunks for one in chunk.prompt_logprobs),
            prompt_end=self._prompt_ends.get(index, ""),
        )
