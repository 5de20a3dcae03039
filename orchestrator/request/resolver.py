"""Checks a GenerateRequest and fills in what it leaves open, without asking a replica.

`IncomingRequest` is the request as it was received, with None for absent fields. `Resolver.resolve` makes a
`ResolvedRequest` from it, or raises an error that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from orchestrator.request.labels import check_labels, check_printable
from orchestrator.request.ticket import Ticket
from orchestrator.text.jobs import ChatPrompt, Prompt, TextPrompt, limit_of
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import ContextTooLong, InvalidRequest, ModelGone, UnknownModel
from outrider.protocol.messages import SEEDS, FinishReason, Mode, ModelInfo, SamplingParams
from outrider.protocol.vocabulary import check_vocabulary

MAX_TASK_CHARACTERS = 64
RANGES = {"max_nodes": (1, 256), "max_depth": (1, 64)}
MIN_PRIORITY = -100
MAX_SECONDS_PER_TOKEN = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a caller for how its request is run."""

    mode: Mode = Mode.AUTO
    task: str = ""
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    do_not_collect: bool = False
    """True when its tokens must not be kept to train drafts."""
    model_version: str = ""
    """Version of the weights that the request needs; empty: any that are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRequest(RunOptions):
    """A GenerateRequest as it was received."""

    model: str = ""
    prompt: Prompt | tuple[int, ...] | None = None
    """A prompt to tokenize, or token ids; None when the request has none."""
    sampling: SamplingParams
    seed: int | None = None
    max_nodes: int | None = None
    max_depth: int | None = None
    prediction: TextPrompt | tuple[int, ...] = ()
    seconds_per_token: float | None = None
    resume_token_ids: tuple[int, ...] = ()
    session: bytes = b""
    truncate_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest(RunOptions):
    """A request that is checked and complete: it can be run."""

    request_id: str
    served: ModelInfo
    prompt: tuple[int, ...]
    resumed: tuple[int, ...] = ()
    """Generated tokens that the caller already has."""
    sampling: SamplingParams
    """Sampling parameters with max_tokens and seed filled in."""
    max_nodes: int = 0
    max_depth: int = 0
    prediction: tuple[int, ...] = ()
    """Token ids that the continuations will resemble."""
    seconds_per_token: float = 0.0
    """Seconds per token that the caller asked for; 0: no such wish."""
    ticket: Ticket | None = None
    chat: bool = False
    """True when the prompt came as messages."""
    complete: bool = False
    """True when the constraint allows nothing after the resumed tokens."""

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and continuation."""
        return int(self.sampling.end_length(len(self.prompt)))

    @property
    def prompt_logprobs(self) -> int:
        """Number of the prompt's tokens whose log probabilities are wanted: all or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self.sampling.end_tokens(self.served.eos_token_ids)

    def without_prompt_logprobs(self) -> ResolvedRequest:
        """The same request for the continuations after the first; only the first reports them."""
        return replace(self, sampling=replace(self.sampling, prompt_logprobs=None))

    def seed_of(self, index: int) -> int:
        """Seed of one continuation."""
        return 0 if self.sampling.greedy else (self.sampling.seed + index) % SEEDS

    def sampling_with(self, seed: int) -> SamplingParams:
        """The parameters that replicas get, without stop strings: the orchestrator finds these itself."""
        return replace(self.sampling, seed=seed, stop=(), n=1)

    def finished_by(self, generated: Sequence[int]) -> FinishReason:
        """Why nothing follows these generated tokens, by the same rules as the verify service applies.

        The reason is NONE when tokens follow. Of a constraint only `complete` is considered.
        """
        if self.complete:
            return FinishReason.STOP
        if not generated:
            return FinishReason.NONE
        if generated[-1] in self.end_token_ids and len(generated) > self.sampling.min_tokens:
            return FinishReason.STOP
        length = len(self.prompt) + len(generated)
        return FinishReason.LENGTH if length >= self.max_length else FinishReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Checks and completes requests for the model that is served now."""

    served: ModelInfo
    tokenizer: TextTokenizer | None
    default_max_tokens: int
    draw_seed: Callable[[], int]
    """Draws a random unsigned 64-bit number, for sampled requests without a seed."""
    max_priority: int = 100

    def check(self, incoming: IncomingRequest) -> None:
        """Check everything that can be checked before the prompt is tokenized.

        Raises:
            InvalidRequest: a field is wrong.
            UnknownModel: another model is served; `ModelGone` when it is the same with other weights.
        """
        if incoming.model not in ("", self.served.model):
            raise UnknownModel(incoming.model, self.served.model)
        if self.served.version and incoming.model_version not in ("", self.served.version):
            raise ModelGone(
                f"model_version: {self.served.model!r} is served with other weights, or another tokenizer, "
                "by now; ask anew, without model_version and resume_token_ids"
            )
        _check_ranges(incoming, self.max_priority)
        check_printable("task", incoming.task)
        check_labels(incoming.labels)
        self._check_sampling(incoming.sampling)
        if incoming.prompt is None:
            raise InvalidRequest("prompt", "set one of text, token_ids and chat")
        self._check_text("token_ids.ids", incoming.prompt)
        self._check_tokens("resume_token_ids", incoming.resume_token_ids)
        self._check_text("speculation.prediction.token_ids.ids", incoming.prediction)
        _check_resume(incoming)

    def resolve(
        self,
        incoming: IncomingRequest,
        request_id: str,
        prompt: tuple[int, ...],
        prediction: tuple[int, ...] = (),
    ) -> ResolvedRequest:
        """The request to run, from one that passed `check` and the tokens of its prompt and prediction.

        Raises:
            InvalidRequest: a field is wrong; `ContextTooLong` when the tokens do not fit the context.
        """
        field = "token_ids.ids" if isinstance(incoming.prompt, tuple | None) else incoming.prompt.field
        if not prompt:
            raise InvalidRequest(field, "must give at least one token")
        self._check_made(incoming.prompt, prompt)
        self._check_made(incoming.prediction, prediction)
        prompt = prompt[-incoming.truncate_prompt_tokens :]  # all of it if that is 0
        return ResolvedRequest(
            request_id=request_id,
            served=self.served,
            prompt=prompt,
            resumed=incoming.resume_token_ids,
            sampling=self._complete_sampling(incoming, field, len(prompt)),
            max_nodes=incoming.max_nodes or 0,
            max_depth=incoming.max_depth or 0,
            prediction=prediction,
            seconds_per_token=incoming.seconds_per_token or 0.0,
            ticket=Ticket.parse(incoming.session) if incoming.session else None,
            chat=isinstance(incoming.prompt, ChatPrompt),
            **{option.name: getattr(incoming, option.name) for option in fields(RunOptions)},
        )

    def _check_text(self, field: str, given: Prompt | tuple[int, ...]) -> None:
        """Check that there is a tokenizer for a text, or that token ids are in the vocabulary."""
        if isinstance(given, tuple):
            self._check_tokens(field, given)
        elif self.tokenizer is None:
            raise InvalidRequest(given.field, "the model came without a tokenizer; send token ids")

    def _check_made(self, given: Prompt | tuple[int, ...] | None, tokens: tuple[int, ...]) -> None:
        """Check the tokens that were made of a text: a tokenizer may have more than the model."""
        size = self.served.vocabulary_size
        if not isinstance(given, tuple | None) and tokens and (token := max(tokens)) >= size:
            raise InvalidRequest(
                given.field, f"the tokenizer makes token {token} of it, and the model has only {size}"
            )

    def _check_tokens(self, field: str, tokens: Collection[int]) -> None:
        check_vocabulary(field, tokens, self.served.vocabulary_size)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_tokens("sampling.stop_token_ids", sampling.stop_token_ids)
        self._check_tokens("sampling.logit_bias", sampling.logit_bias)
        if sampling.constraint is not None and self.tokenizer is None:
            field = sampling.constraint.field
            raise InvalidRequest(
                field, "the model came without a tokenizer, which constraints need; leave it out"
            )
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("sampling.stop", "the model came without a tokenizer; use stop_token_ids")

    def _complete_sampling(self, incoming: IncomingRequest, field: str, prompt_length: int) -> SamplingParams:
        room = self.served.context_length - prompt_length
        if room < 1:
            raise ContextTooLong(
                field,
                f"{prompt_length} tokens leave no room: {limit_of(self.served.context_length)}; shorten it",
            )
        sampling = incoming.sampling
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ContextTooLong(
                "sampling.max_tokens",
                f"{sampling.max_tokens} and a prompt of {prompt_length} tokens do not fit: "
                f"{limit_of(self.served.context_length)}; lower it or shorten the prompt",
            )
        max_tokens = sampling.max_tokens or min(self.default_max_tokens or room, room)
        if (resumed := len(incoming.resume_token_ids)) > max_tokens:
            raise InvalidRequest(
                "resume_token_ids", f"must have at most max_tokens ({max_tokens}) tokens, not {resumed}"
            )
        return replace(sampling, max_tokens=max_tokens, seed=self._seed(incoming))

    def _seed(self, incoming: IncomingRequest) -> int:
        if incoming.sampling.greedy:
            return 0
        return self.draw_seed() if incoming.seed is None else incoming.seed


def _check_ranges(incoming: IncomingRequest, max_priority: int) -> None:
    named = {
        "speculation.max_nodes": (incoming.max_nodes, RANGES["max_nodes"]),
        "speculation.max_depth": (incoming.max_depth, RANGES["max_depth"]),
        "priority": (incoming.priority, (MIN_PRIORITY, max_priority)),
    }
    for name, (value, (low, high)) in named.items():
        if value is not None and not low <= value <= high:
            raise InvalidRequest(name, f"must be between {low} and {high}, not {value}")
    if len(incoming.task) > MAX_TASK_CHARACTERS:
        raise InvalidRequest("task", f"must have at most {MAX_TASK_CHARACTERS} characters")
    pace = incoming.seconds_per_token
    if pace is not None and not 0.0 < pace <= MAX_SECONDS_PER_TOKEN:
        raise InvalidRequest(
            "speculation.seconds_per_token",
            f"must be above 0 and at most {MAX_SECONDS_PER_TOKEN:.0f}, not {pace:g}",
        )


def _check_resume(incoming: IncomingRequest) -> None:
    if not incoming.resume_token_ids:
        return
    if incoming.sampling.prompt_logprobs is not None:
        raise InvalidRequest("sampling.prompt_logprobs", "came before the tokens to resume; leave it out")
    if incoming.sampling.n > 1:
        raise InvalidRequest("resume_token_ids", "continues one stream; set sampling.n to 1")
    if not incoming.sampling.greedy and incoming.seed is None:
        raise InvalidRequest("sampling.seed", "must be the seed that the stream to resume was made with")
