from outrider.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenBlock(_message.Message):
    __slots__ = ("first_id", "parents", "tokens", "acceptances", "ready", "base_length", "traceparent", "expand_start_unix_nano", "expand_micros")
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    EXPAND_START_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    EXPAND_MICROS_FIELD_NUMBER: _ClassVar[int]
    first_id: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    acceptances: _containers.RepeatedScalarFieldContainer[float]
    ready: bool
    base_length: int
    traceparent: str
    expand_start_unix_nano: int
    expand_micros: int
    def __init__(self, first_id: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., acceptances: _Optional[_Iterable[float]] = ..., ready: _Optional[bool] = ..., base_length: _Optional[int] = ..., traceparent: _Optional[str] = ..., expand_start_unix_nano: _Optional[int] = ..., expand_micros: _Optional[int] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("forward_start_unix_nano", "queue_micros", "forward_micros", "sample_micros", "idle_micros")
    FORWARD_START_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MICROS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MICROS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MICROS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MICROS_FIELD_NUMBER: _ClassVar[int]
    forward_start_unix_nano: int
    queue_micros: int
    forward_micros: int
    sample_micros: int
    idle_micros: int
    def __init__(self, forward_start_unix_nano: _Optional[int] = ..., queue_micros: _Optional[int] = ..., forward_micros: _Optional[int] = ..., sample_micros: _Optional[int] = ..., idle_micros: _Optional[int] = ...) -> None: ...

class StepNodes(_message.Message):
    __slots__ = ("tokens", "parents", "origins")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_tokens_pb2.TokenOrigin]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_tokens_pb2.TokenOrigin, str]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("step", "base_length", "tokens", "verified", "accepted", "depth", "hit", "lookup_verified", "batch_size", "logprobs", "times", "finish_reason", "node_price", "prompt_tokens", "draft_wanted", "next_step_micros", "take_turns", "nodes", "predicted", "predicted_accepted", "features")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NODE_PRICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WANTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_MICROS_FIELD_NUMBER: _ClassVar[int]
    TAKE_TURNS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    step: int
    base_length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    verified: int
    accepted: int
    depth: int
    hit: bool
    lookup_verified: int
    batch_size: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_tokens_pb2.TokenLogprob]
    times: StepTimes
    finish_reason: _tokens_pb2.FinishReason
    node_price: float
    prompt_tokens: int
    draft_wanted: bool
    next_step_micros: int
    take_turns: bool
    nodes: StepNodes
    predicted: int
    predicted_accepted: int
    features: bytes
    def __init__(self, step: _Optional[int] = ..., base_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., depth: _Optional[int] = ..., hit: _Optional[bool] = ..., lookup_verified: _Optional[int] = ..., batch_size: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_tokens_pb2.TokenLogprob, _Mapping]]] = ..., times: _Optional[_Union[StepTimes, _Mapping]] = ..., finish_reason: _Optional[_Union[_tokens_pb2.FinishReason, str]] = ..., node_price: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., draft_wanted: _Optional[bool] = ..., next_step_micros: _Optional[int] = ..., take_turns: _Optional[bool] = ..., nodes: _Optional[_Union[StepNodes, _Mapping]] = ..., predicted: _Optional[int] = ..., predicted_accepted: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...

class PromptFeatures(_message.Message):
    __slots__ = ("position", "rows")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    position: int
    rows: bytes
    def __init__(self, position: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("owner", "incarnation", "id", "length", "digest", "expires_unix_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    incarnation: str
    id: str
    length: int
    digest: bytes
    expires_unix_ms: int
    def __init__(self, owner: _Optional[str] = ..., incarnation: _Optional[str] = ..., id: _Optional[str] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...
