"""Converts between messages of the public service and the orchestrator's own types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from orchestrator.observing.timeline import Step, TimelineEvent
from orchestrator.output import Chunk, Completion, Started
from orchestrator.request.chat_wire import bytes_of, check_counts, conversation_from_pb
from orchestrator.request.labels import MAX_LABELS
from orchestrator.request.resolver import IncomingRequest
from orchestrator.text.jobs import ChatPrompt, Ids, Prompt, TextPrompt, limit_of, too_long
from outrider.protocol.errors import ContextTooLong, InvalidRequest, UnknownModel
from outrider.protocol.messages import ModelInfo, TokenLogprob
from outrider.protocol.same_names import fields_of, plain_fields
from outrider.protocol.sampling_wire import sampling_from_pb
from outrider.protocol.vocabulary import check_vocabulary
from outrider.protocol.wire import logprob_to_pb, mode_from_pb
from outrider.v1 import generation_pb2, tokens_pb2

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_NAME = 512
"""Most characters of a model's name."""
COUNTS = (
    *("steps", "drafted", "verified", "accepted", "hits", "acceptance_length"),
    *("draft_losses", "verify_losses"),
)
TIMES = ("forward", "sample", "queue", "idle", "draft", "decode", "decode_busy")
SPANS = ("admission", "first_token", "total")
"""Fields that `SpeculationStats` shares with `Statistics` (counts and times) and `Completion` (spans)."""


def check_lengths(pb: generation_pb2.GenerateRequest, positions: int, bytes_per_token: int) -> None:
    """Check that a request's lists and texts can fit the context, before they are converted.

    `positions` is the length of the context, `bytes_per_token` the most bytes of text that a token stands
    for. The largest message takes a few milliseconds. Lists of sampling parameters are checked later.

    Raises:
        InvalidRequest: there are too many entries; `ContextTooLong` when a prompt cannot fit the context.
    """
    _check_name(pb.model)
    _check_tokens("resume_token_ids", len(pb.resume_token_ids), positions)
    match pb.WhichOneof("prompt"):
        case "token_ids":
            _check_tokens("token_ids.ids", len(pb.token_ids.ids), positions)
        case "text":
            _check_bytes("text", len(pb.text.encode()), positions, bytes_per_token)
        case "chat":
            _check_chat(pb.chat, positions, bytes_per_token)
    prediction, field = pb.speculation.prediction, "speculation.prediction"
    _check_bytes(f"{field}.text", len(prediction.text.encode()), positions, bytes_per_token)
    _check_tokens(f"{field}.token_ids.ids", len(prediction.token_ids.ids), positions)


def _check_name(model: str) -> None:
    if len(model) > MAX_NAME:
        raise InvalidRequest("model", f"must have at most {MAX_NAME} characters")


def _check_chat(chat: generation_pb2.Chat, positions: int, bytes_per_token: int) -> None:
    check_counts(chat, positions)
    _check_bytes("chat.messages", bytes_of(chat, positions * bytes_per_token), positions, bytes_per_token)


def _check_tokens(field: str, tokens: int, positions: int) -> None:
    if tokens > positions:
        raise ContextTooLong(field, f"{tokens} tokens do not fit: {limit_of(positions)}; send fewer")


def _check_bytes(field: str, size: int, positions: int, bytes_per_token: int) -> None:
    """Check a text's size. Without a tokenizer do nothing, because the field itself is refused later."""
    if bytes_per_token and size > positions * bytes_per_token:
        length = f"{size} bytes, in tokens of at most {bytes_per_token} bytes,"
        raise too_long(field, length, positions)


def incoming_from_pb(
    pb: generation_pb2.GenerateRequest, model_defaults: Mapping[str, float] | None = None
) -> IncomingRequest:
    """A request as it was received; `model_defaults` are used for sampling parameters that it does not set.

    Raises:
        InvalidRequest: a sampling parameter is out of its range, or the mode is unknown.
    """
    given = plain_fields(pb) | plain_fields(pb.speculation)
    del given["text"]  # it belongs to the prompt
    given |= {
        "prompt": _prompt(pb),
        "sampling": sampling_from_pb(pb.sampling, model_defaults),
        "seed": pb.sampling.seed if pb.sampling.HasField("seed") else None,
        "mode": mode_from_pb(pb.speculation.mode),
        "prediction": _prediction(pb.speculation.prediction),
        "labels": _labels(pb),
    }
    return IncomingRequest(**given)


def _prompt(pb: generation_pb2.GenerateRequest) -> Prompt | tuple[int, ...] | None:
    match pb.WhichOneof("prompt"):
        case "text":
            return TextPrompt(pb.text)
        case "token_ids":
            return tuple(pb.token_ids.ids)
        case "chat":
            return ChatPrompt(conversation_from_pb(pb.chat))
    return None


def _prediction(pb: generation_pb2.Prediction) -> TextPrompt | tuple[int, ...]:
    if pb.WhichOneof("content") == "text":
        return TextPrompt(pb.text, special_tokens=False, field="speculation.prediction")
    return tuple(pb.token_ids.ids)


def _labels(pb: generation_pb2.GenerateRequest) -> dict[str, str]:
    """The labels, which are counted before they are read."""
    if len(pb.labels) > MAX_LABELS:
        raise InvalidRequest("labels", f"must be at most {MAX_LABELS}, not {len(pb.labels)}")
    return dict(pb.labels)


def prompt_from_pb(
    pb: generation_pb2.TokenizeRequest, served: ModelInfo, positions: int, bytes_per_token: int
) -> Prompt:
    """The prompt to tokenize, if it can have at most `positions` tokens; see `check_lengths`.

    Raises:
        InvalidRequest: a field is wrong; `ContextTooLong` when the prompt is too long.
        UnknownModel: another model is served.
    """
    _check_model(pb.model, served)
    special = pb.add_special_tokens if pb.HasField("add_special_tokens") else None
    match pb.WhichOneof("prompt"):
        case "text":
            _check_bytes("text", len(pb.text.encode()), positions, bytes_per_token)
            if pb.HasField("add_generation_prompt"):
                raise InvalidRequest("add_generation_prompt", "is for chat; leave it out")
            return TextPrompt(pb.text, special is not False)
        case "chat":
            _check_chat(pb.chat, positions, bytes_per_token)
            if pb.HasField("add_generation_prompt"):
                pb.chat.add_generation_prompt = pb.add_generation_prompt
            return ChatPrompt(conversation_from_pb(pb.chat), special is True)
    raise InvalidRequest("prompt", "set one of text and chat")


def ids_from_pb(pb: generation_pb2.DetokenizeRequest, served: ModelInfo) -> Ids:
    """Token ids whose text is wanted.

    Raises:
        InvalidRequest: an id is not in the vocabulary; `ContextTooLong` when they do not fit the context.
        UnknownModel: another model is served.
    """
    _check_model(pb.model, served)
    _check_tokens("token_ids", len(pb.token_ids), served.context_length)
    ids = tuple(pb.token_ids)
    check_vocabulary("token_ids", ids, served.vocabulary_size)
    return Ids(ids, pb.keep_special_tokens)


def _check_model(model: str, served: ModelInfo) -> None:
    _check_name(model)
    if model not in ("", served.model):
        raise UnknownModel(model, served.model)


def tokens_to_pb(tokens: Sequence[int], served: ModelInfo) -> generation_pb2.TokenizeResponse:
    """The answer to `Tokenize`."""
    return generation_pb2.TokenizeResponse(
        token_ids=tokens, count=len(tokens), context_length=served.context_length
    )


def models_to_pb(served: ModelInfo, text: bool, chat: bool) -> generation_pb2.ListModelsResponse:
    """The answer to `ListModels`; `text` and `chat` say which prompts can be used."""
    model = generation_pb2.Model(
        name=served.model,
        context_length=served.context_length,
        vocabulary_size=served.vocabulary_size,
        text_prompts=text,
        chat_prompts=chat,
    )
    return generation_pb2.ListModelsResponse(models=[model])


def response_to_pb(
    item: Started | Chunk | Completion, spelling: Callable[[int], bytes] | None = None
) -> generation_pb2.GenerateResponse:
    """One message of the response stream; `spelling` returns the bytes that a token stands for."""
    match item:
        case Chunk():
            return generation_pb2.GenerateResponse(chunk=_chunk(item, spelling))
        case Completion():
            return generation_pb2.GenerateResponse(complete=_complete(item))
        case Started():
            return generation_pb2.GenerateResponse(started=generation_pb2.Started(**fields_of(item)))


def _chunk(item: Chunk, spelling: Callable[[int], bytes] | None) -> generation_pb2.Chunk:
    return generation_pb2.Chunk(
        index=item.index,
        text=item.text,
        token_ids=item.tokens,
        logprobs=[_logprob(logprob, spelling) for logprob in item.logprobs],
        origins=cast(tuple[tokens_pb2.TokenOrigin, ...], item.origins),
        step=None if item.step is None else _step(item.step, spelling),
        prompt_logprobs=[_logprob(logprob, spelling) for logprob in item.prompt_logprobs],
    )


def _step(step: Step, spelling: Callable[[int], bytes] | None) -> generation_pb2.StepDetail:
    spelled = spelling or _no_spelling
    nodes, accepted, bonus = step.nodes, step.accepted, step.bonus
    return generation_pb2.StepDetail(
        step=step.verdict.step,
        nodes=[
            generation_pb2.StepNode(
                token=token,
                spelling=spelled(token),
                parent=None if parent < 0 else parent,
                origin=cast(tokens_pb2.TokenOrigin, origin),
                accepted=index in accepted,
            )
            for index, (token, parent, origin) in enumerate(
                zip(nodes.tokens, nodes.parents, nodes.origins, strict=True)
            )
        ],
        bonus=bonus,
        bonus_spelling=None if bonus is None else spelled(bonus),
        timeline=[_timeline_event(event) for event in step.events],
    )


def _no_spelling(token: int) -> bytes | None:
    return None


def _logprob(logprob: TokenLogprob, spelling: Callable[[int], bytes] | None) -> tokens_pb2.TokenLogprob:
    pb = logprob_to_pb(logprob)
    if spelling is not None:
        pb.spelling = spelling(pb.token)
        for top in pb.top:
            top.spelling = spelling(top.token)
    return pb


def _complete(item: Completion) -> generation_pb2.Complete:
    return generation_pb2.Complete(
        index=item.index,
        finish_reason=cast(tokens_pb2.FinishReason, item.reason),
        stop=item.stop,
        usage=generation_pb2.Usage(
            prompt_tokens=item.prompt_tokens,
            completion_tokens=item.completion_tokens,
            cached_tokens=item.statistics.cached,
            accepted_prediction_tokens=item.statistics.predicted_accepted,
            rejected_prediction_tokens=item.statistics.predicted - item.statistics.predicted_accepted,
        ),
        speculation=_speculation(item),
        session=item.session,
        seed=item.seed,
        model=item.model,
        request_id=item.request_id,
        timeline=[_timeline_event(event) for event in item.timeline],
    )


def _speculation(item: Completion) -> generation_pb2.SpeculationStats:
    statistics = item.statistics
    return generation_pb2.SpeculationStats(
        **{name: getattr(statistics, name) for name in COUNTS},
        **{f"{name}_micros": _uint32(getattr(statistics, f"{name}_us")) for name in TIMES},
        **{f"{name}_micros": _micros(getattr(item, f"{name}_seconds")) for name in SPANS},
        accepted_histogram=statistics.histogram,
    )


def _timeline_event(event: TimelineEvent) -> generation_pb2.TimelineEvent:
    return generation_pb2.TimelineEvent(
        lane=cast(generation_pb2.TimelineEvent.Lane, event.lane),
        start_unix_nano=min(event.start_ns, MAX_UINT64),  # a replica's clock may be wrong
        duration_micros=_uint32(event.duration_us),
        name=event.name,
        step=event.step,
        nodes=event.nodes,
        accepted=event.accepted,
    )


def _micros(seconds: float) -> int:
    return _uint32(round(seconds * 1e6))


def _uint32(value: int) -> int:
    """The value, limited to 32 bits. Microseconds fit up to 71 minutes; longer times are cut to the limit."""
    return min(max(value, 0), MAX_UINT32)
