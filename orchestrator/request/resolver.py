"""From what a caller asked to what is run: every check of a GenerateRequest that needs no replica.

`Asked` is the request as it came, absent fields as None; `resolve` gives a `Request` with nothing left
open, or raises an error that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.request.labels import check_labels
from orchestrator.request.ticket import Ticket
from orchestrator.text.conversation import Conversation
from orchestrator.text.jobs import ChatPrompt, Prompt, TextPrompt
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import ContextTooLong, InvalidRequest, UnknownModel
from outrider.protocol.messages import FinishReason, Mode, ModelInfo, SamplingParams

MAX_SEED = 2**64
MAX_TASK_CHARACTERS = 64
RANGES = {"max_nodes": (1, 256), "max_depth": (1, 64)}
MIN_PRIORITY = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
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
    task: str = ""
    resume_token_ids: tuple[int, ...] = ()
    session: bytes = b""
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    truncate_prompt_tokens: int = 0

    @property
    def prompt(self) -> Prompt | None:
        """What has to be tokenized; None where token ids came, or no prompt."""
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
class Request:
    """A request that can be run."""

    request_id: str
    served: ModelInfo
    prompt: tuple[int, ...]
    resumed: tuple[int, ...] = ()
    """Generated tokens that the caller already has."""
    sampling: SamplingParams
    """With max_tokens and seed filled in."""
    mode: Mode = Mode.AUTO
    max_nodes: int = 0
    max_depth: int = 0
    prediction: tuple[int, ...] = ()
    """What the continuations will resemble."""
    task: str = ""
    priority: int = 0
    ticket: Ticket | None = None
    keep_session: bool = False
    record_timeline: bool = False
    record_steps: bool = False
    chat: bool = False
    """The prompt came as messages."""
    complete: bool = False
    """The resumed tokens are all that the constraint allows."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and continuation."""
        assert self.sampling.max_tokens is not None
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def prompt_logprobs(self) -> int:
        """Tokens of the prompt whose log probabilities are wanted: all or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt)

    def without_prompt_logprobs(self) -> Request:
        """The same for all continuations but the first, which tells them."""
        return replace(self, sampling=replace(self.sampling, prompt_logprobs=None))

    def seed_of(self, index: int) -> int:
        """Seed of one continuation."""
        return 0 if self.sampling.greedy else (self.sampling.seed + index) % MAX_SEED

    def sampling_with(self, seed: int) -> SamplingParams:
        """What replicas get for one continuation; stop strings are looked for here, not there."""
        return replace(self.sampling, seed=seed, stop=(), n=1)

    def finished_by(self, generated: Sequence[int]) -> FinishReason:
        """Why nothing follows these generated tokens, by the rules that the verify service applies; what the
        constraint says is known of the resumed ones."""
        if self.complete:
            return FinishReason.STOP
        if not generated:
            return FinishReason.NONE
        stops = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            stops.update(self.served.eos_token_ids)
        if generated[-1] in stops and len(generated) > self.sampling.min_tokens:
            return FinishReason.STOP
        assert self.sampling.max_tokens is not None
        return FinishReason.LENGTH if len(generated) >= self.sampling.max_tokens else FinishReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Checks and completes requests for what is served now."""

    served: ModelInfo
    tokenizer: TextTokenizer | None
    default_max_tokens: int
    draw_seed: Callable[[], int]
    """A random unsigned 64-bit number, for sampled requests that bring none."""
    max_priority: int = 100

    def check(self, asked: Asked) -> None:
        """Everything that can be said before the prompt is tokenized.

        Raises:
            InvalidRequest: a field is wrong.
            UnknownModel: another model is served.
        """
        if asked.model not in ("", self.served.model):
            raise UnknownModel(asked.model, self.served.model)
        _check_ranges(asked, self.max_priority)
        check_labels(asked.labels)
        self._check_sampling(asked.sampling)
        if asked.text is not None or asked.chat is not None:
            self._text_tokenizer("text" if asked.chat is None else "chat")
        self._check_tokens("resume_token_ids", asked.resume_token_ids)
        if isinstance(asked.prediction, str):
            self._text_tokenizer("speculation.prediction")
        else:
            self._check_tokens("speculation.prediction.token_ids.ids", asked.prediction)
        _check_resume(asked)

    def resolve(self, asked: Asked, request_id: str, tokens: tuple[int, ...] | None = None) -> Request:
        """The request to run; `tokens` are those of its text or chat where they are known already.

        Raises:
            InvalidRequest: a field is wrong; `ContextTooLong` when the tokens do not fit the context.
            UnknownModel: another model is served.
        """
        self.check(asked)
        field, prompt = self._prompt(asked, tokens)
        prompt = prompt[-asked.truncate_prompt_tokens :]  # all of it where that is 0
        return Request(
            request_id=request_id,
            served=self.served,
            prompt=prompt,
            resumed=asked.resume_token_ids,
            sampling=self._complete_sampling(asked, field, len(prompt)),
            mode=asked.mode,
            max_nodes=asked.max_nodes or 0,
            max_depth=asked.max_depth or 0,
            prediction=self._predicted(asked),
            task=asked.task,
            priority=asked.priority,
            ticket=Ticket.parse(asked.session) if asked.session else None,
            keep_session=asked.keep_session,
            record_timeline=asked.record_timeline,
            record_steps=asked.record_steps,
            chat=field == "chat.messages",
            labels=asked.labels,
        )

    def _prompt(self, asked: Asked, tokens: tuple[int, ...] | None) -> tuple[str, tuple[int, ...]]:
        """The field that the prompt came in, and its tokens."""
        if asked.token_ids is not None:
            field, tokens = "token_ids.ids", asked.token_ids
            self._check_tokens(field, tokens)
        elif asked.text is not None:
            field = "text"
            tokens = self._text_tokenizer(field).encode(asked.text) if tokens is None else tokens
        elif asked.chat is not None:
            field = "chat.messages"
            tokens = self._text_tokenizer("chat").encode_chat(asked.chat) if tokens is None else tokens
        else:
            raise InvalidRequest("prompt", "set one of text, token_ids and chat")
        if not tokens:
            raise InvalidRequest(field, "must give at least one token")
        if asked.truncate_prompt_tokens and len(tokens) > self.served.context_length:
            raise ContextTooLong(field, f"{len(tokens)} tokens do not fit the context, even to be truncated")
        return field, tokens

    def _predicted(self, asked: Asked) -> tuple[int, ...]:
        text = asked.predicted_text
        if text is not None:
            return text.tokens(self._text_tokenizer(text.field))
        assert not isinstance(asked.prediction, str)
        return asked.prediction

    def _text_tokenizer(self, field: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(field, "the model came without a tokenizer; send token_ids")
        return self.tokenizer

    def _check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        check_vocabulary(field, tokens, self.served.vocabulary_size)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_tokens("sampling.stop_token_ids", sampling.stop_token_ids)
        for token in sampling.logit_bias:
            if token >= self.served.vocabulary_size:
                size = self.served.vocabulary_size
                raise InvalidRequest(
                    f"sampling.logit_bias[{token}]", f"is not below the vocabulary size {size}"
                )
        if sampling.constraint is not None and self.tokenizer is None:
            field = sampling.constraint.field
            raise InvalidRequest(
                field, "the model came without a tokenizer, which constraints need; leave it out"
            )
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("sampling.stop", "the model came without a tokenizer; use stop_token_ids")

    def _complete_sampling(self, asked: Asked, field: str, prompt_length: int) -> SamplingParams:
        room = self.served.context_length - prompt_length
        if room < 1:
            raise ContextTooLong(
                field, f"{prompt_length} tokens leave no room in the context of {self.served.context_length}"
            )
        sampling = asked.sampling
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ContextTooLong(
                "sampling.max_tokens",
                f"{sampling.max_tokens} and a prompt of {prompt_length} tokens exceed the context of "
                f"{self.served.context_length}; lower it or shorten the prompt",
            )
        max_tokens = sampling.max_tokens or min(self.default_max_tokens or room, room)
        if len(asked.resume_token_ids) > max_tokens:
            raise InvalidRequest("resume_token_ids", f"must be at most max_tokens {max_tokens}")
        return replace(sampling, max_tokens=max_tokens, seed=self._seed(asked))

    def _seed(self, asked: Asked) -> int:
        if asked.sampling.greedy:
            return 0
        return self.draw_seed() if asked.seed is None else asked.seed


def check_vocabulary(field: str, tokens: Sequence[int], size: int) -> None:
    """Whether token ids are those of a vocabulary.

    Raises:
        InvalidRequest: one is not below `size`.
    """
    if tokens and max(tokens) >= size:
        index = next(index for index, token in enumerate(tokens) if token >= size)
        raise InvalidRequest(f"{field}[{index}]", f"{tokens[index]} is not below the vocabulary size {size}")


def _check_ranges(asked: Asked, max_priority: int) -> None:
    named = {
        "speculation.max_nodes": (asked.max_nodes, RANGES["max_nodes"]),
        "speculation.max_depth": (asked.max_depth, RANGES["max_depth"]),
        "priority": (asked.priority, (MIN_PRIORITY, max_priority)),
        "task (characters)": (len(asked.task), (0, MAX_TASK_CHARACTERS)),
    }
    for name, (value, (low, high)) in named.items():
        if value is not None and not low <= value <= high:
            raise InvalidRequest(name, f"must be between {low} and {high}, not {value}")


def _check_resume(asked: Asked) -> None:
    if not asked.resume_token_ids:
        return
    if asked.sampling.prompt_logprobs is not None:
        raise InvalidRequest("sampling.prompt_logprobs", "came before the tokens to resume; leave it out")
    if asked.sampling.n > 1:
        raise InvalidRequest("resume_token_ids", "continues one stream; set sampling.n to 1")
    if not asked.sampling.greedy and asked.seed is None:
        raise InvalidRequest("sampling.seed", "must be the seed that the stream to resume was made with")
