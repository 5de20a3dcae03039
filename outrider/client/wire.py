"""Converts the client's requests to messages of the public service, and its short answers back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from google.protobuf.message import Message as Pb

from outrider.client.conversation import Message
from outrider.client.request import MODES, Prompt, Request, TokenizeOptions, request_of
from outrider.client.results import Load, Model, ModelInfo, Tokens
from outrider.protocol.errors import ConfigError, DeadlineExceeded, InvalidRequest, OutriderError, Unavailable
from outrider.protocol.rpc_errors import DETAILS_KEY, error_of
from outrider.protocol.same_names import plain_fields
from outrider.protocol.sampling_wire import present_fields
from outrider.request_ids import HEADER
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2

OTHER_SERVICE = "UNIMPLEMENTED: "
"""Beginning of gRPC's message for an endpoint that does not have the method."""
UNREACHABLE = ("UNAVAILABLE: failed to connect", "UNAVAILABLE: errors resolving")
"""Beginnings of gRPC's message for an endpoint that it cannot connect to."""
HTTP_1 = "http1.x server"
"""Part of gRPC's message for an endpoint that speaks HTTP/1."""
NOT_HTTP_2 = "Expected SETTINGS frame as the first frame"
"""Part of gRPC's message for an endpoint that answers in another way still, such as Python's HTTP server."""
BROKEN = ("Stream removed", "Socket closed", "Connection reset")
"""gRPC's message for a connection that broke during a call has one of these."""
LATE = "Deadline Exceeded"
"""Part of gRPC's message when the deadline has passed; the message says no more than that."""
NOT_TLS = ("WRONG_VERSION_NUMBER", "packet length too long")
"""gRPC's message for an endpoint that does not speak TLS has one of these."""
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
"""gRPC's message for a certificate that is not valid here has one of these."""
CLOSED = "Socket closed"
"""Part of gRPC's message for an endpoint that closed the connection: it ends, or it is a TLS server that was
sent plaintext."""


def stub(channel: Any) -> Any:
    """The public service behind a channel, blocking or not as the channel is."""
    return generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


def request_to_pb(request: Request) -> generation_pb2.GenerateRequest:
    """A request for the wire.

    Raises:
        InvalidRequest: a value does not fit its field, which is named.
    """
    pb = generation_pb2.GenerateRequest()
    if isinstance(request.prompt, str) or request.chat:
        _fill_text(pb, request)
    else:
        pb.token_ids.SetInParent()
        _extend(pb.token_ids.ids, "token_ids.ids", request.prompt)
    _fill(pb.sampling, "sampling.", request, _single_values(tokens_pb2.SamplingParams))
    _extend(pb.sampling.stop, "sampling.stop", request.stop)
    _extend(pb.sampling.stop_token_ids, "sampling.stop_token_ids", request.stop_token_ids)
    _fill_map(pb.sampling.logit_bias, "sampling.logit_bias", request.logit_bias)
    _fill_constraint(pb.sampling, request)
    if request.mode not in MODES:
        raise InvalidRequest("speculation.mode", f"must be one of {', '.join(MODES)}, not {request.mode!r}")
    _set(pb.speculation, "speculation.", "mode", generation_pb2.Mode.Value(f"MODE_{request.mode.upper()}"))
    _fill(pb.speculation, "speculation.", request, ("max_nodes", "max_depth", "seconds_per_token"))
    _fill_prediction(pb, request.prediction)
    _fill(pb, "", request, _single_values(generation_pb2.GenerateRequest))
    _fill_map(pb.labels, "labels", request.labels)
    _extend(pb.resume_token_ids, "resume_token_ids", request.resume_token_ids)
    return pb


def empty_request(method: str) -> Any:
    """The empty request message of a method."""
    return getattr(generation_pb2, f"{method}Request")()


def info_from_pb(pb: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    """The model and service that answer."""
    target = pb.target
    return ModelInfo(
        **plain_fields(pb),
        model=target.model,
        vocabulary_size=target.vocabulary_size,
        context_length=target.context_length,
        eos_token_ids=tuple(target.eos_token_ids),
        sampling_defaults=present_fields(target.sampling_defaults),
    )


def load_from_pb(pb: generation_pb2.GetLoadResponse) -> Load:
    """How busy the service is."""
    return Load(**plain_fields(pb))


def models_from_pb(pb: generation_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The models that a request may name."""
    return tuple(Model(**plain_fields(one)) for one in pb.models)


def tokenize_to_pb(prompt: Prompt, options: TokenizeOptions) -> generation_pb2.TokenizeRequest:
    """A message that asks for the token ids of a text or a conversation.

    Raises:
        InvalidRequest: a value does not fit its field, which is named, or the prompt is neither.
    """
    pb = generation_pb2.TokenizeRequest()
    given: Any = dict(options)
    own = {name: given.pop(name, None) for name in ("model", "add_special_tokens", "add_generation_prompt")}
    request = request_of(prompt, given)
    if not isinstance(request.prompt, str) and not request.chat:
        raise InvalidRequest("prompt", "must be a text or messages")
    _fill_text(pb, request)
    for name, value in own.items():
        _set(pb, "", name, value)
    return pb


def tokens_from_pb(pb: generation_pb2.TokenizeResponse) -> Tokens:
    """The token ids of a prompt."""
    return Tokens(token_ids=tuple(pb.token_ids), context_length=pb.context_length)


def detokenize_to_pb(
    token_ids: Sequence[int], model: str, keep_special_tokens: bool
) -> generation_pb2.DetokenizeRequest:
    """A message that asks for the text of token ids.

    Raises:
        InvalidRequest: a value does not fit its field, which is named.
    """
    pb = generation_pb2.DetokenizeRequest()
    _set(pb, "", "model", model)
    _set(pb, "", "keep_special_tokens", keep_special_tokens)
    _extend(pb.token_ids, "token_ids", token_ids)
    return pb


def explained(error: Any, endpoint: str) -> OutriderError:
    """The error that a failed call to an orchestrator's endpoint stands for."""
    ours = "the orchestrator's port, 7700 by default"
    found = in_plain_words(error_of(error), endpoint, "`outrider up` or an orchestrator", ours)
    told = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    if told or type(found) is not Unavailable or not any(sign in str(found) for sign in BROKEN):
        return found
    return Unavailable(f"the connection to {endpoint} broke; try again")


def in_plain_words(found: OutriderError, endpoint: str, service: str, port: str) -> OutriderError:
    """The error without gRPC's words for an endpoint that cannot be reached.

    The sentence says which service, and whose port, is meant.
    """
    if isinstance(found, DeadlineExceeded) and LATE in str(found):
        return DeadlineExceeded(f"{endpoint} did not finish its answer in time; raise the timeout")
    if str(found).startswith(OTHER_SERVICE):
        return ConfigError(f"{endpoint} is another service, or of another release; give {port}")
    if type(found) is not Unavailable or not str(found).startswith(UNREACHABLE):
        return found
    if HTTP_1 in str(found):
        return ConfigError(f"{endpoint} speaks HTTP, not gRPC; give {port}")
    if NOT_HTTP_2 in str(found):
        return ConfigError(f"{endpoint} answers, but does not speak gRPC; give {port}")
    if any(sign in str(found) for sign in NOT_TLS):
        return ConfigError(f"{endpoint} does not speak TLS; leave the TLS authorities out")
    if any(sign in str(found) for sign in UNTRUSTED):
        return Unavailable(
            f"{endpoint} shows a certificate that is expired, for another name, or by other authorities; "
            "give its TLS authorities, and the name in the certificate as the host"
        )
    if CLOSED in str(found):
        return Unavailable(
            f"{endpoint} closed the connection; it has ended, has too many connections, or it speaks TLS: "
            "then give the TLS authorities, and a client certificate if it wants one"
        )
    return Unavailable(f"cannot reach {endpoint}; is {service} running there?")


def metadata_of(token: str, request_id: str, traceparent: str) -> tuple[tuple[str, str], ...]:
    """Call metadata, without entries for empty values.

    Raises:
        InvalidRequest: a value has a character that no header can carry.
    """
    for name, value in (("token", token), ("request_id", request_id), ("traceparent", traceparent)):
        if not (value.isascii() and value.isprintable()):
            raise InvalidRequest(name, "must be printable ASCII")
    bearer = f"Bearer {token}" if token else ""
    given = (("authorization", bearer), (HEADER, request_id), ("traceparent", traceparent))
    return tuple((name, value) for name, value in given if value)


def _fill_text(pb: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, request: Request) -> None:
    """Set the prompt: a text or a conversation."""
    if isinstance(request.prompt, str):
        _set(pb, "", "text", request.prompt)
        return
    pb.chat.SetInParent()
    for index, message in enumerate(cast(tuple[Message, ...], request.prompt)):
        _fill_message(pb.chat.messages.add(), f"chat.messages[{index}].", message)
    for index, tool in enumerate(request.tools):
        _fill(pb.chat.tools.add(), f"chat.tools[{index}].", tool, ("name", "description", "parameters"))
    names = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    _fill(pb.chat, "chat.", request, names)


@cache
def _single_values(kind: type[Pb]) -> list[str]:
    """Fields that hold at most one value, which is no message, and that exclude no other field."""
    return [
        field.name
        for field in kind.DESCRIPTOR.fields
        if field.message_type is None
        and not field.is_repeated
        and (field.containing_oneof is None or len(field.containing_oneof.fields) == 1)
    ]


def _fill_prediction(pb: generation_pb2.GenerateRequest, prediction: str | Sequence[int]) -> None:
    if not prediction:
        return
    filled, path = pb.speculation.prediction, "speculation.prediction."
    if isinstance(prediction, str):
        _set(filled, path, "text", prediction)
    else:
        _extend(filled.token_ids.ids, path + "token_ids.ids", prediction)


def _fill_message(pb: generation_pb2.ChatMessage, path: str, message: Message) -> None:
    _fill(pb, path, message, ("role", "name", "tool_call_id", "reasoning_content"))
    if isinstance(message.content, str) or not isinstance(message.content, Sequence):
        _set(pb, path, "content", message.content)
    else:
        for number, text in enumerate(message.content):
            _set(pb.parts.add(), f"{path}parts[{number}].", "text", text)
    for number, call in enumerate(message.tool_calls):
        _fill(pb.tool_calls.add(), f"{path}tool_calls[{number}].", call, ("id", "name", "arguments"))


def _fill(pb: Pb, path: str, given: Any, names: Sequence[str]) -> None:
    """Set the fields of a message that have the same names as the attributes of `given`."""
    for name in names:
        _set(pb, path, name, getattr(given, name))


def _fill_map(field: Any, path: str, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        try:
            field[key] = value
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{path}[{key!r:.100}]", _problem(value, error)) from None


def _fill_constraint(pb: Any, request: Request) -> None:
    """Set the constraint on the text."""
    schema = request.json_schema
    if schema is not None and not isinstance(schema, str):
        try:
            schema = json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("sampling.json_schema", f"cannot be written as JSON ({error})") from None
    given: dict[str, Any] = {"json_schema": schema, "json_object": request.json_object or None}
    given |= {"regex": request.regex, "grammar": request.grammar, "choice": request.choice or None}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise InvalidRequest(f"sampling.{chosen[1]}", f"cannot be given with {chosen[0]}")
    for name in chosen:
        if name == "choice":
            _extend(pb.choice.texts, "sampling.choice", request.choice)
        else:
            _set(pb, "sampling.", name, given[name])


def _set(pb: Pb, path: str, name: str, value: Any) -> None:
    if value is None:
        return
    try:
        setattr(pb, name, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(path + name, _problem(value, error)) from None


def _extend(field: Any, path: str, values: Any) -> None:
    if isinstance(values, str | bytes):  # otherwise its characters or bytes would become the entries
        raise InvalidRequest(path, f"must be a list, such as [{values[:40]!r}]")
    try:
        field.extend(values)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(path, _problem(values, error)) from None


def _problem(value: object, error: Exception) -> str:
    """What is wrong with a value that a field does not take."""
    if isinstance(value, int) and isinstance(error, ValueError):
        return f"{value} is out of the range of its field; use {'0 or more' if value < 0 else 'less'}"
    if isinstance(error, UnicodeEncodeError):
        return f"has half a character (\\u{ord(error.object[error.start]):04x}); send whole ones"
    return f"is of the wrong kind or out of range ({error})"
