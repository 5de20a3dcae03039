from outrider.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_AUTO: _ClassVar[Mode]
    MODE_SEQUENTIAL: _ClassVar[Mode]
    MODE_OFF: _ClassVar[Mode]
MODE_UNSPECIFIED: Mode
MODE_AUTO: Mode
MODE_SEQUENTIAL: Mode
MODE_OFF: Mode

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "parts", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    chat_template_kwargs: str
    add_generation_prompt: bool
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., chat_template_kwargs: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _tokens_pb2.TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_tokens_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("mode", "max_nodes", "max_depth", "prediction", "seconds_per_token")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    max_nodes: int
    max_depth: int
    prediction: Prediction
    seconds_per_token: float
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., seconds_per_token: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "speculation", "task", "resume_token_ids", "session", "keep_session", "record_timeline", "priority", "record_steps", "labels", "truncate_prompt_tokens", "do_not_collect", "model_version")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_SESSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_STEPS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DO_NOT_COLLECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: _tokens_pb2.TokenIds
    chat: Chat
    sampling: _tokens_pb2.SamplingParams
    speculation: SpeculationParams
    task: str
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    session: bytes
    keep_session: bool
    record_timeline: bool
    priority: int
    record_steps: bool
    labels: _containers.ScalarMap[str, str]
    truncate_prompt_tokens: int
    do_not_collect: bool
    model_version: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_tokens_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_tokens_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., task: _Optional[str] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., session: _Optional[bytes] = ..., keep_session: _Optional[bool] = ..., record_timeline: _Optional[bool] = ..., priority: _Optional[int] = ..., record_steps: _Optional[bool] = ..., labels: _Optional[_Mapping[str, str]] = ..., truncate_prompt_tokens: _Optional[int] = ..., do_not_collect: _Optional[bool] = ..., model_version: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("index", "request_id", "seed", "model", "prompt_tokens", "cached_tokens", "model_version", "prompt_end")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_END_FIELD_NUMBER: _ClassVar[int]
    index: int
    request_id: str
    seed: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    model_version: str
    prompt_end: str
    def __init__(self, index: _Optional[int] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., model_version: _Optional[str] = ..., prompt_end: _Optional[str] = ...) -> None: ...

class StepNode(_message.Message):
    __slots__ = ("token", "spelling", "parent", "origin", "accepted")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPELLING_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    token: int
    spelling: bytes
    parent: int
    origin: _tokens_pb2.TokenOrigin
    accepted: bool
    def __init__(self, token: _Optional[int] = ..., spelling: _Optional[bytes] = ..., parent: _Optional[int] = ..., origin: _Optional[_Union[_tokens_pb2.TokenOrigin, str]] = ..., accepted: _Optional[bool] = ...) -> None: ...

class StepDetail(_message.Message):
    __slots__ = ("step", "nodes", "bonus", "bonus_spelling", "timeline")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    BONUS_SPELLING_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    step: int
    nodes: _containers.RepeatedCompositeFieldContainer[StepNode]
    bonus: int
    bonus_spelling: bytes
    timeline: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    def __init__(self, step: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[StepNode, _Mapping]]] = ..., bonus: _Optional[int] = ..., bonus_spelling: _Optional[bytes] = ..., timeline: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "origins", "step", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_tokens_pb2.TokenLogprob]
    origins: _containers.RepeatedScalarFieldContainer[_tokens_pb2.TokenOrigin]
    step: StepDetail
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_tokens_pb2.TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_tokens_pb2.TokenLogprob, _Mapping]]] = ..., origins: _Optional[_Iterable[_Union[_tokens_pb2.TokenOrigin, str]]] = ..., step: _Optional[_Union[StepDetail, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_tokens_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("steps", "drafted", "verified", "accepted", "hits", "acceptance_length", "draft_losses", "verify_losses", "first_token_micros", "total_micros", "forward_micros", "sample_micros", "queue_micros", "idle_micros", "draft_micros", "admission_micros", "decode_micros", "decode_busy_micros", "accepted_histogram")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOSSES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_LOSSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MICROS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MICROS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MICROS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MICROS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MICROS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MICROS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MICROS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MICROS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MICROS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BUSY_MICROS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafted: int
    verified: int
    accepted: int
    hits: int
    acceptance_length: float
    draft_losses: int
    verify_losses: int
    first_token_micros: int
    total_micros: int
    forward_micros: int
    sample_micros: int
    queue_micros: int
    idle_micros: int
    draft_micros: int
    admission_micros: int
    decode_micros: int
    decode_busy_micros: int
    accepted_histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., drafted: _Optional[int] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., hits: _Optional[int] = ..., acceptance_length: _Optional[float] = ..., draft_losses: _Optional[int] = ..., verify_losses: _Optional[int] = ..., first_token_micros: _Optional[int] = ..., total_micros: _Optional[int] = ..., forward_micros: _Optional[int] = ..., sample_micros: _Optional[int] = ..., queue_micros: _Optional[int] = ..., idle_micros: _Optional[int] = ..., draft_micros: _Optional[int] = ..., admission_micros: _Optional[int] = ..., decode_micros: _Optional[int] = ..., decode_busy_micros: _Optional[int] = ..., accepted_histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("lane", "start_unix_nano", "duration_micros", "name", "step", "nodes", "accepted")
    class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LANE_UNSPECIFIED: _ClassVar[TimelineEvent.Lane]
        LANE_DRAFT: _ClassVar[TimelineEvent.Lane]
        LANE_WIRE: _ClassVar[TimelineEvent.Lane]
        LANE_VERIFY: _ClassVar[TimelineEvent.Lane]
    LANE_UNSPECIFIED: TimelineEvent.Lane
    LANE_DRAFT: TimelineEvent.Lane
    LANE_WIRE: TimelineEvent.Lane
    LANE_VERIFY: TimelineEvent.Lane
    LANE_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    DURATION_MICROS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    lane: TimelineEvent.Lane
    start_unix_nano: int
    duration_micros: int
    name: str
    step: int
    nodes: int
    accepted: int
    def __init__(self, lane: _Optional[_Union[TimelineEvent.Lane, str]] = ..., start_unix_nano: _Optional[int] = ..., duration_micros: _Optional[int] = ..., name: _Optional[str] = ..., step: _Optional[int] = ..., nodes: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("index", "finish_reason", "stop", "usage", "speculation", "session", "seed", "model", "request_id", "timeline")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: _tokens_pb2.FinishReason
    stop: str
    usage: Usage
    speculation: SpeculationStats
    session: bytes
    seed: int
    model: str
    request_id: str
    timeline: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_tokens_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., session: _Optional[bytes] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., request_id: _Optional[str] = ..., timeline: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "complete", "started")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    complete: Complete
    started: Started
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target", "verify_replicas", "draft_replicas", "text_prompts", "chat_prompts")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERIFY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TEXT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    target: _tokens_pb2.ModelInfo
    verify_replicas: int
    draft_replicas: int
    text_prompts: bool
    chat_prompts: bool
    def __init__(self, target: _Optional[_Union[_tokens_pb2.ModelInfo, _Mapping]] = ..., verify_replicas: _Optional[int] = ..., draft_replicas: _Optional[int] = ..., text_prompts: _Optional[bool] = ..., chat_prompts: _Optional[bool] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "context_length", "vocabulary_size", "text_prompts", "chat_prompts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEXT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_length: int
    vocabulary_size: int
    text_prompts: bool
    chat_prompts: bool
    def __init__(self, name: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., text_prompts: _Optional[bool] = ..., chat_prompts: _Optional[bool] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "add_generation_prompt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    add_generation_prompt: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "count", "context_length")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    count: int
    context_length: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ..., context_length: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "keep_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., keep_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "places", "free_places", "pages", "pages_free", "verify_replicas", "draft_replicas", "tokens_per_second")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    FREE_PLACES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    places: int
    free_places: int
    pages: int
    pages_free: int
    verify_replicas: int
    draft_replicas: int
    tokens_per_second: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., places: _Optional[int] = ..., free_places: _Optional[int] = ..., pages: _Optional[int] = ..., pages_free: _Optional[int] = ..., verify_replicas: _Optional[int] = ..., draft_replicas: _Optional[int] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...
