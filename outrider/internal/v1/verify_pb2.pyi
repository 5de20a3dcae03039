from outrider.internal.v1 import session_pb2 as _session_pb2
from outrider.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_POLICY_UNSPECIFIED: _ClassVar[VerifyPolicy]
    VERIFY_POLICY_PIPELINED: _ClassVar[VerifyPolicy]
    VERIFY_POLICY_SEQUENTIAL: _ClassVar[VerifyPolicy]
    VERIFY_POLICY_OFF: _ClassVar[VerifyPolicy]
VERIFY_POLICY_UNSPECIFIED: VerifyPolicy
VERIFY_POLICY_PIPELINED: VerifyPolicy
VERIFY_POLICY_SEQUENTIAL: VerifyPolicy
VERIFY_POLICY_OFF: VerifyPolicy

class OpenVerify(_message.Message):
    __slots__ = ("request_id", "model", "token_ids", "kv_handle", "prompt_length", "sampling", "policy", "max_nodes", "vocabulary_hash", "first_step", "traceparent", "task", "priority", "lookup", "record_steps", "prediction", "first_prompt_logprob", "seconds_per_token", "feature_layers", "all_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RECORD_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ALL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_handle: _session_pb2.KvHandle
    prompt_length: int
    sampling: _tokens_pb2.SamplingParams
    policy: VerifyPolicy
    max_nodes: int
    vocabulary_hash: str
    first_step: int
    traceparent: str
    task: str
    priority: int
    lookup: bool
    record_steps: bool
    prediction: _containers.RepeatedScalarFieldContainer[int]
    first_prompt_logprob: int
    seconds_per_token: float
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    all_token_ids: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_tokens_pb2.SamplingParams, _Mapping]] = ..., policy: _Optional[_Union[VerifyPolicy, str]] = ..., max_nodes: _Optional[int] = ..., vocabulary_hash: _Optional[str] = ..., first_step: _Optional[int] = ..., traceparent: _Optional[str] = ..., task: _Optional[str] = ..., priority: _Optional[int] = ..., lookup: _Optional[bool] = ..., record_steps: _Optional[bool] = ..., prediction: _Optional[_Iterable[int]] = ..., first_prompt_logprob: _Optional[int] = ..., seconds_per_token: _Optional[float] = ..., feature_layers: _Optional[_Iterable[int]] = ..., all_token_ids: _Optional[bool] = ...) -> None: ...

class CloseVerify(_message.Message):
    __slots__ = ("keep", "move")
    KEEP_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    keep: bool
    move: bool
    def __init__(self, keep: _Optional[bool] = ..., move: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("open", "propose", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenVerify
    propose: _session_pb2.TokenBlock
    close: CloseVerify
    def __init__(self, open: _Optional[_Union[OpenVerify, _Mapping]] = ..., propose: _Optional[_Union[_session_pb2.TokenBlock, _Mapping]] = ..., close: _Optional[_Union[CloseVerify, _Mapping]] = ...) -> None: ...

class VerifyOpened(_message.Message):
    __slots__ = ("replica", "incarnation", "cached_length", "draft_wanted")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WANTED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    cached_length: int
    draft_wanted: bool
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., cached_length: _Optional[int] = ..., draft_wanted: _Optional[bool] = ...) -> None: ...

class VerifyClosed(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("position", "logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_tokens_pb2.TokenLogprob]
    def __init__(self, position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_tokens_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("opened", "verdict", "closed", "prompt_logprobs", "prompt_features")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    opened: VerifyOpened
    verdict: _session_pb2.Verdict
    closed: VerifyClosed
    prompt_logprobs: PromptLogprobs
    prompt_features: _session_pb2.PromptFeatures
    def __init__(self, opened: _Optional[_Union[VerifyOpened, _Mapping]] = ..., verdict: _Optional[_Union[_session_pb2.Verdict, _Mapping]] = ..., closed: _Optional[_Union[VerifyClosed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., prompt_features: _Optional[_Union[_session_pb2.PromptFeatures, _Mapping]] = ...) -> None: ...

class VerifyServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _tokens_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_tokens_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens", "add_bos_token", "tool_chat_template")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    add_bos_token: bool
    tool_chat_template: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., add_bos_token: _Optional[bool] = ..., tool_chat_template: _Optional[str] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkKvRequest(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ForkKvResponse(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class FetchKvRequest(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class FetchKvResponse(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: KvPart
    def __init__(self, part: _Optional[_Union[KvPart, _Mapping]] = ...) -> None: ...

class StoreKvRequest(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: KvPart
    def __init__(self, part: _Optional[_Union[KvPart, _Mapping]] = ...) -> None: ...

class StoreKvResponse(_message.Message):
    __slots__ = ("kv_handle",)
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    kv_handle: _session_pb2.KvHandle
    def __init__(self, kv_handle: _Optional[_Union[_session_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("tokens", "layout", "pages")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    tokens: KvTokens
    layout: KvLayout
    pages: KvPages
    def __init__(self, tokens: _Optional[_Union[KvTokens, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., pages: _Optional[_Union[KvPages, _Mapping]] = ...) -> None: ...

class KvTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("weights", "arithmetic", "dtype", "page_size", "shape")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    weights: str
    arithmetic: str
    dtype: str
    page_size: int
    shape: str
    def __init__(self, weights: _Optional[str] = ..., arithmetic: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., shape: _Optional[str] = ...) -> None: ...

class KvPages(_message.Message):
    __slots__ = ("first", "contents", "digests")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    contents: _containers.RepeatedScalarFieldContainer[bytes]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, first: _Optional[int] = ..., contents: _Optional[_Iterable[bytes]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...
