"""Checks a GenerateRequest and fills in what it leaves open; needs no replica.

`IncomingRequest` is the request as it came, absent fields as None. `Resolver.resolve` makes a
`ResolvedRequest` of it, or raises an error that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.request.labels import check_labels
from orchestrator.request.ticket import Ticket
from orchestrator.text.conversation import Conversation
from orchestrator.text.jobs import ChatPrompt, Prompt, TextPrompt
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import ContextTooLong, InvalidRequest, UnknownModel
from outrider.protocol.messages import FinishReason, Mode, ModelInfo, SamplingParams
from outrider.protocol.vocabulary import check_vocabulary

MAX_SEED = 2**64
MAX_TASK_CHARACTERS = 64
RANGES = {"max_nodes": (1, 256), "max_depth": (1, 64)}
MIN_PRIORITY = -100
MAX_SECONDS_PER_TOKEN = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRequest:
    """A GenerateRequest as it came; at most one of text, token_ids and chat is set."""

    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Conversation | None = None
    sampling: SamplingParams
    seed: int | None = None
    mode: Mode = Mode.AUTO
    max_nodes: int | None = None
    max_depth: int | None = None
    prediction: str | tuple[int, ...] = ()
    seconds_per_token: float | None = None
    task: str = ""
    resume_token_ids: tuple[int, ...] = ()
    session: bytes = b""
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    truncate_prompt_tokens: int = 0
    do_not_collect: bool = False

    @property
    def prompt(self) -> Prompt | None:
        """The prompt that has to be tokenized; None where token ids came, or no prompt."""
        if self.text is not None:
            return TextPrompt(self.text)
        return None if self.chat is None else ChatPrompt(self.chat)

    @property
    def predicted_text(self) -> TextPrompt | None:
        """The prediction where it has to be tokenized."""
        if not isinstance(self.prediction, str):
            return None
        return TextPrompt(self.prediction, special_tokens=False, field="speculation.prediction")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request that is checked and complete: it can be run."""

    request_id: str
    served: ModelInfo
    prompt: tuple[int, ...]
    resumed: tuple[int, ...] = ()
    """Generated tokens that the caller already has."""
    sampling: SamplingParams
    """Sampling parameters with max_tokens and seed filled in."""
    mode: Mode = Mode.AUTO
    max_nodes: int = 0
    max_depth: int = 0
    prediction: tuple[int, ...] = ()
    """Token ids that the continuations will resemble."""
    seconds_per_token: float = 0.0
    """The pace that the caller asked for; 0: none."""
    task: str = ""
    priority: int = 0
    ticket: Ticket | None = None
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    chat: bool = False
    """True when the prompt came as messages."""
    complete: bool = False
    """True when the constraint allows nothing after the resumed tokens."""
    labels: Mapping[str, str] = field(default_factory=dict)
    do_not_collect: bool = False
    """True when its tokens must not be kept to train drafts."""

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and continuation."""
        return int(self.sampling.end_length(len(self.prompt)))

    @property
    def prompt_logprobs(self) -> int:
        """Tokens of the prompt whose log probabilities are wanted: all or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt)

    def without_prompt_logprobs(self) -> ResolvedRequest:
        """The same request for the continuations after the first, which alone reports them."""
        return replace(self, sampling=replace(self.sampling, prompt_logprobs=None))

    def seed_of(self, index: int) -> int:
        """Seed of one continuation."""
        return 0 if self.sampling.greedy else (self.sampling.seed + index) % MAX_SEED

    def sampling_with(self, seed: int) -> SamplingParams:
        """What replicas get for one continuation. Stop strings are left out: the orchestrator finds them."""
        return replace(self.sampling, seed=seed, stop=(), n=1)

    def finished_by(self, generated: Sequence[int]) -> FinishReason:
        """Why nothing follows these generated tokens, by the same rules as the verify service applies.

        NONE: something follows. A constraint counts only by `complete`.
        """
        if self.complete:
            return FinishReason.STOP
        if not generated:
            return FinishReason.NONE
        stops = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            stops.update(self.served.eos_token_ids)
        if generated[-1] in stops and len(generated) > self.sampling.min_tokens:
            return FinishReason.STOP
        length = len(self.prompt) + len(generated)
        return FinishReason.LENGTH if length >= self.max_length else FinishReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Checks and completes requests for what is served now."""

    served: ModelInfo
    tokenizer: TextTokenizer | None
    default_max_tokens: int
    draw_seed: Callable[[], int]
    """A random unsigned 64-bit number, for sampled requests that bring none."""
    max_priority: int = 100

    def check(self, incoming: IncomingRequest) -> None:
        """Check all that can be checked before the prompt is tokenized.

        Raises:
            InvalidRequest: a field is wrong.
            UnknownModel: another model is served.
        """
        if incoming.model not in ("", self.served.model):
            raise UnknownModel(incoming.model, self.served.model)
        _check_ranges(incoming, self.max_priority)
        check_labels(incoming.labels)
        self._check_sampling(incoming.sampling)
        if incoming.text is not None or incoming.chat is not None:
            self._text_tokenizer("text" if incoming.chat is None else "chat")
        self._check_tokens("resume_token_ids", incoming.resume_token_ids)
        if isinstance(incoming.prediction, str):
            self._text_tokenizer("speculation.prediction")
        else:
            self._check_tokens("speculation.prediction.token_ids.ids", incoming.prediction)
        _check_resume(incoming)

    def resolve(
        self, incoming: IncomingRequest, request_id: str, tokens: tuple[int, ...] | None = None
    ) -> ResolvedRequest:
        """The request to run. `tokens` are those of its text or chat, where it is tokenized already.

        Raises:
            InvalidRequest: a field is wrong; `ContextTooLong` when the tokens do not fit the context.
            UnknownModel: another model is served.
        """
        self.check(incoming)
        field, prompt = self._prompt(incoming, tokens)
        prompt = prompt[-incoming.truncate_prompt_tokens :]  # all of it where that is 0
        return ResolvedRequest(
            request_id=request_id,
            served=self.served,
            prompt=prompt,
            resumed=incoming.resume_token_ids,
            sampling=self._complete_sampling(incoming, field, len(prompt)),
            mode=incoming.mode,
            max_nodes=incoming.max_nodes or 0,
            max_depth=incoming.max_depth or 0,
            prediction=self._predicted(incoming),
            seconds_per_token=incoming.seconds_per_token or 0.0,
            task=incoming.task,
            priority=incoming.priority,
            ticket=Ticket.parse(incoming.session) if incoming.session else None,
            keep_session=incoming.keep_session,
            record_timeline=incoming.record_timeline,
            record_steps=incoming.record_steps,
            chat=field == "chat.messages",
            labels=incoming.labels,
            do_not_collect=incoming.do_not_collect,
        )

    def _prompt(
        self, incoming: IncomingRequest, tokens: tuple[int, ...] | None
    ) -> tuple[str, tuple[int, ...]]:
        """The field that the prompt came in, and its tokens."""
        if incoming.token_ids is not None:
            field, tokens = "token_ids.ids", incoming.token_ids
            self._check_tokens(field, tokens)
        elif incoming.text is not None:
            field = "text"
            tokens = self._text_tokenizer(field).encode(incoming.text) if tokens is None else tokens
        elif incoming.chat is not None:
            field = "chat.messages"
            tokens = self._text_tokenizer("chat").encode_chat(incoming.chat) if tokens is None else tokens
        else:
            raise InvalidRequest("prompt", "set one of text, token_ids and chat")
        if not tokens:
            raise InvalidRequest(field, "must give at least one token")
        if incoming.truncate_prompt_tokens and len(tokens) > self.served.context_length:
            raise ContextTooLong(field, f"{len(tokens)} tokens do not fit the context, even to be truncated")
        return field, tokens

    def _predicted(self, incoming: IncomingRequest) -> tuple[int, ...]:
        text = incoming.predicted_text
        if text is not None:
            return text.tokens(self._text_tokenizer(text.field))
        assert not isinstance(incoming.prediction, str)
        return incoming.prediction

    def _text_tokenizer(self, field: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(field, "the model came without a tokenizer; send token_ids")
        return self.tokenizer

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
                field, f"{prompt_length} tokens leave no room in the context of {self.served.context_length}"
            )
        sampling = incoming.sampling
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ContextTooLong(
                "sampling.max_tokens",
                f"{sampling.max_tokens} and a prompt of {prompt_length} tokens exceed the context of "
                f"{self.served.context_length}; lower it or shorten the prompt",
            )
        max_tokens = sampling.max_tokens or min(self.default_max_tokens or room, room)
        if len(incoming.resume_token_ids) > max_tokens:
            raise InvalidRequest("resume_token_ids", f"must be at most max_tokens {max_tokens}")
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
        "task (characters)": (len(incoming.task), (0, MAX_TASK_CHARACTERS)),
    }
    for name, (value, (low, high)) in named.items():
        if value is not None and not low <= value <= high:
            raise InvalidRequest(name, f"must be between {low} and {high}, not {value}")
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
