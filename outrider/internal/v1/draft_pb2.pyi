from outrider.internal.v1 import session_pb2 as _session_pb2
from outrider.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenDraft(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_length", "sampling", "pipelined", "max_nodes", "max_depth", "vocabulary_hash", "first_node_id", "first_step", "traceparent", "task", "feature_layers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PIPELINED_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _tokens_pb2.SamplingParams
    pipelined: bool
    max_nodes: int
    max_depth: int
    vocabulary_hash: str
    first_node_id: int
    first_step: int
    traceparent: str
    task: str
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_tokens_pb2.SamplingParams, _Mapping]] = ..., pipelined: _Optional[bool] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., vocabulary_hash: _Optional[str] = ..., first_node_id: _Optional[int] = ..., first_step: _Optional[int] = ..., traceparent: _Optional[str] = ..., task: _Optional[str] = ..., feature_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseDraft(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("open", "verdict", "close", "prompt_features")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    open: OpenDraft
    verdict: _session_pb2.Verdict
    close: CloseDraft
    prompt_features: _session_pb2.PromptFeatures
    def __init__(self, open: _Optional[_Union[OpenDraft, _Mapping]] = ..., verdict: _Optional[_Union[_session_pb2.Verdict, _Mapping]] = ..., close: _Optional[_Union[CloseDraft, _Mapping]] = ..., prompt_features: _Optional[_Union[_session_pb2.PromptFeatures, _Mapping]] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("replica", "incarnation", "cached_length")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    cached_length: int
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., cached_length: _Optional[int] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("opened", "block")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    opened: DraftOpened
    block: _session_pb2.TokenBlock
    def __init__(self, opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., block: _Optional[_Union[_session_pb2.TokenBlock, _Mapping]] = ...) -> None: ...

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _tokens_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_tokens_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class SetShadowRequest(_message.Message):
    __slots__ = ("shadow", "version")
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    shadow: bool
    version: str
    def __init__(self, shadow: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class SetShadowResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _tokens_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_tokens_pb2.ModelInfo, _Mapping]] = ...) -> None: ...
