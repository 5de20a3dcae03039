"""Messages and domain types: round trips, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.internal.v1 import draft_pb2, session_pb2, verify_pb2
from outrider.protocol import sampling_wire, wire
from outrider.protocol.constraint import MAX_CHOICES, Constraint, ConstraintKind
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import (
    FinishReason,
    KvHandle,
    Mode,
    ModelInfo,
    OpenDraft,
    Opened,
    OpenVerify,
    Origin,
    PromptFeatures,
    SamplingParams,
    StepNodes,
    StepTimes,
    TokenBlock,
    TokenLogprob,
    Verdict,
    VerifyPolicy,
)
from outrider.v1 import tokens_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
words = st.text(max_size=8)
tokens = st.lists(uint32, max_size=6).map(tuple)


def decimal(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers as people write them: up to four digits behind the point."""
    return st.integers(math.ceil(low * 10_000), math.floor(high * 10_000)).map(lambda n: n / 10_000)


float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
probability = st.floats(0, 1, width=32)
constraints = st.one_of(
    st.just(Constraint(ConstraintKind.JSON_OBJECT)),
    st.builds(
        lambda kind, text: Constraint(kind, (text,)),
        st.sampled_from([ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR]),
        st.text(min_size=1, max_size=8),
    ),
    st.builds(
        lambda texts: Constraint(ConstraintKind.CHOICE, tuple(texts)),
        st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    ),
)
sampling = st.builds(
    SamplingParams,
    temperature=decimal(0, 100),
    top_p=decimal(0.0001, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=decimal(0, 1),
    repetition_penalty=decimal(0.01, 100),
    presence_penalty=decimal(-2, 2),
    frequency_penalty=decimal(-2, 2),
    logit_bias=st.dictionaries(uint32, decimal(-100, 100), max_size=3),
    seed=uint64,
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 16),
    constraint=st.none() | constraints,
)
handles = st.builds(KvHandle, words, words, words, uint32, st.binary(max_size=8), uint64)
logprobs = st.builds(
    TokenLogprob, uint32, float32, st.lists(st.tuples(uint32, float32), max_size=2).map(tuple)
)


@st.composite
def blocks(draw: st.DrawFn) -> TokenBlock:
    """Blocks with columns of equal length."""
    size = draw(st.integers(0, 5))

    def column(values: st.SearchStrategy[object]) -> tuple[object, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    parents = column(st.integers(-(2**63), 2**63 - 1))
    return TokenBlock(
        draw(uint64),
        parents,
        column(uint32),
        column(probability),
        draw(st.booleans()),
        draw(uint32),
        draw(words),
        draw(uint64),
        draw(uint32),
    )


@st.composite
def step_nodes(draw: st.DrawFn) -> StepNodes:
    """Trees as columns of equal length."""
    size = draw(st.integers(0, 5))
    return StepNodes(
        tuple(draw(uint32) for _ in range(size)),
        tuple(draw(st.integers(-1, index - 1)) for index in range(size)),
        tuple(draw(st.sampled_from(Origin)) for _ in range(size)),
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Verdicts with no log probabilities or one per token."""
    chosen = draw(tokens)
    reported = draw(st.lists(logprobs, min_size=len(chosen), max_size=len(chosen)))
    return Verdict(
        step=draw(uint32),
        base_length=draw(uint32),
        tokens=chosen,
        verified=draw(uint32),
        accepted=draw(uint32),
        depth=draw(uint32),
        hit=draw(st.booleans()),
        lookup_verified=draw(uint32),
        batch_size=draw(uint32),
        logprobs=tuple(reported) if draw(st.booleans()) else (),
        times=StepTimes(draw(uint64), draw(uint32), draw(uint32), draw(uint32), draw(uint32)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        node_price=draw(st.floats(0, 1e6, width=32)),
        prompt_tokens=draw(uint32),
        draft_wanted=draw(st.booleans()),
        next_step_micros=draw(uint32),
        take_turns=draw(st.booleans()),
        nodes=draw(st.none() | step_nodes()),
        predicted=draw(uint32),
        predicted_accepted=draw(uint32),
        features=draw(st.binary(max_size=8)),
    )


open_verifies = st.builds(
    OpenVerify,
    request_id=words,
    model=words,
    token_ids=tokens,
    prompt_length=uint32,
    sampling=sampling,
    kv_handle=st.none() | handles,
    policy=st.sampled_from(VerifyPolicy),
    max_nodes=uint32,
    vocabulary_hash=words,
    first_step=uint32,
    traceparent=words,
    task=words,
    priority=int32,
    lookup=st.booleans(),
    record_steps=st.booleans(),
    prediction=tokens,
    feature_layers=tokens,
)
open_drafts = st.builds(
    OpenDraft,
    request_id=words,
    token_ids=tokens,
    prompt_length=uint32,
    sampling=sampling,
    pipelined=st.booleans(),
    max_nodes=uint32,
    max_depth=uint32,
    vocabulary_hash=words,
    first_node_id=uint64,
    first_step=uint32,
    traceparent=words,
    task=words,
    feature_layers=tokens,
)
prompt_features = st.builds(PromptFeatures, uint32, st.binary(max_size=8))
infos = st.builds(
    ModelInfo,
    model=words,
    vocabulary_hash=words,
    vocabulary_size=uint32,
    context_length=uint32,
    eos_token_ids=tokens,
    bos_token_id=st.none() | uint32,
    replica=words,
    incarnation=words,
    max_sessions=uint32,
    sessions=uint32,
    kind=words,
    dtype=words,
    device=words,
    pages=uint32,
    pages_free=uint32,
    feature_layers=tokens,
    hidden_size=uint32,
    num_layers=uint32,
)
opened = st.builds(Opened, words, words, uint32)
ROUND_TRIPS = {
    "block": (blocks(), wire.block_to_pb, wire.block_from_pb),
    "verdict": (verdicts(), wire.verdict_to_pb, wire.verdict_from_pb),
    "logprob": (logprobs, wire.logprob_to_pb, wire.logprob_from_pb),
    "sampling": (sampling, sampling_wire.sampling_to_pb, sampling_wire.sampling_from_pb),
    "kv_handle": (handles, wire.kv_handle_to_pb, wire.kv_handle_from_pb),
    "model_info": (infos, wire.model_info_to_pb, wire.model_info_from_pb),
    "open_verify": (open_verifies, wire.open_verify_to_pb, wire.open_verify_from_pb),
    "open_draft": (open_drafts, wire.open_draft_to_pb, wire.open_draft_from_pb),
    "opened_verify": (opened, wire.opened_verify_to_pb, wire.opened_from_pb),
    "opened_draft": (opened, wire.opened_draft_to_pb, wire.opened_from_pb),
    "mode": (st.sampled_from(Mode), int, wire.mode_from_pb),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_through_bytes_changes_nothing(name: str) -> None:
    """What one side says is what the other side reads, for every type and every value of its range."""
    values, to_pb, from_pb = ROUND_TRIPS[name]

    @given(values)
    def check(value: object) -> None:
        pb = to_pb(value)
        if not isinstance(pb, int):
            pb = type(pb).FromString(pb.SerializeToString())
        assert from_pb(pb) == value

    check()


def test_absent_sampling_fields_take_their_defaults() -> None:
    """An empty message is greedy decoding without penalties."""
    assert sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams()) == SamplingParams()


def test_zero_is_a_value_of_its_own() -> None:
    """A field set to zero is not a field left out: top_p 0 is refused, max_tokens 0 too."""
    for name in ("top_p", "max_tokens", "n", "repetition_penalty"):
        with pytest.raises(InvalidRequest) as refusal:
            sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams(**{name: 0}))
        assert refusal.value.field == f"sampling.{name}"


def test_unspecified_enums_mean_their_documented_value() -> None:
    """Messages that leave an enum out get pipelining and automatic mode."""
    assert wire.open_verify_from_pb(verify_pb2.OpenVerify()).policy is VerifyPolicy.PIPELINED
    assert wire.mode_from_pb(0) is Mode.AUTO


def test_numbers_arrive_as_the_caller_wrote_them() -> None:
    """The wire has float32, but 0.7 is 0.7 again behind it, and odd float32 values survive."""
    assert sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams(temperature=0.7)).temperature == 0.7
    odd = 0.7300000190734863  # what float32 makes of 0.73
    assert sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams(temperature=odd)).temperature == 0.73
    exact = 1.0 + 2.0**-23
    again = sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams(temperature=exact))
    assert sampling_wire.sampling_to_pb(again).temperature == exact


def _block(**changes: object) -> session_pb2.TokenBlock:
    fields = {"first_id": 1, "parents": [-1, 1], "tokens": [5, 6], "acceptances": [0.5, 0.5], **changes}
    return session_pb2.TokenBlock(**fields)


def _too_many() -> session_pb2.TokenBlock:
    size = wire.MAX_BLOCK_NODES + 1
    return _block(parents=[-1] * size, tokens=[1] * size, acceptances=[0.5] * size)


REFUSED = [
    (wire.block_from_pb, _block(parents=[-1]), "propose.parents"),
    (wire.block_from_pb, _block(acceptances=[0.5] * 3), "propose.acceptances"),
    (wire.block_from_pb, _block(tokens=[]), "propose.parents"),
    (wire.block_from_pb, _too_many(), "propose.tokens"),
    (wire.block_from_pb, _block(traceparent="0" * 65), "propose.traceparent"),
    (wire.block_from_pb, _block(acceptances=[0.5, math.nan]), "propose.acceptances"),
    (wire.block_from_pb, _block(acceptances=[math.inf, -math.inf]), "propose.acceptances"),
    (
        wire.verdict_from_pb,
        session_pb2.Verdict(tokens=[1, 2], logprobs=[tokens_pb2.TokenLogprob()]),
        "verdict.logprobs",
    ),
    (wire.verdict_from_pb, session_pb2.Verdict(finish_reason=77), "verdict.finish_reason"),
    (wire.open_verify_from_pb, verify_pb2.OpenVerify(policy=77), "policy"),
    (
        wire.open_draft_from_pb,
        draft_pb2.OpenDraft(sampling=tokens_pb2.SamplingParams(min_p=2)),
        "sampling.min_p",
    ),
    (sampling_wire.sampling_from_pb, tokens_pb2.SamplingParams(temperature=math.nan), "sampling.temperature"),
    (
        sampling_wire.sampling_from_pb,
        tokens_pb2.SamplingParams(logit_bias={7: math.inf}),
        "sampling.logit_bias[7]",
    ),
    (sampling_wire.sampling_from_pb, tokens_pb2.SamplingParams(stop=[""]), "sampling.stop[0]"),
    (wire.mode_from_pb, 9, "speculation.mode"),
]


@pytest.mark.parametrize(("read", "message", "field"), REFUSED, ids=lambda value: str(value)[:24].strip())
def test_bad_shape_is_refused_naming_the_field(read: object, message: object, field: str) -> None:
    """A message that cannot be meant is refused, and the refusal says where it is wrong."""
    with pytest.raises(InvalidRequest) as refusal:
        read(message)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("parents", "origins", "count"),
    [
        ([-1], [2], 2),
        ([-1, 0], [2], 2),
        ([0, -1], [2, 2], 2),
        ([-2, -1], [2, 2], 2),
        ([-1] * 257, [2] * 257, 257),
    ],
)
def test_nodes_of_a_verdict_that_are_no_tree_are_refused(
    parents: list[int], origins: list[int], count: int
) -> None:
    """Columns of unequal length, parents that are no earlier nodes, and too many of them."""
    nodes = session_pb2.StepNodes(tokens=[5] * count, parents=parents, origins=origins)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"verdict\.nodes"):
        wire.verdict_from_pb(session_pb2.Verdict(tokens=[5], nodes=nodes))


def test_too_many_choices_are_refused_without_a_copy_of_all() -> None:
    """One more than is allowed is enough to tell."""
    pb = tokens_pb2.SamplingParams(choice=tokens_pb2.Choice(texts=["x"] * (50 * MAX_CHOICES)))
    with pytest.raises(InvalidRequest, match=r"sampling\.choice: must have at most 1024 texts, not 1025"):
        sampling_wire.sampling_from_pb(pb)


def test_no_json_object_is_no_constraint() -> None:
    """A flag that is false asks for nothing."""
    assert sampling_wire.sampling_from_pb(tokens_pb2.SamplingParams(json_object=False)).constraint is None


@given(prompt_features)
def test_features_of_a_text_survive(found: PromptFeatures) -> None:
    """As bytes."""
    assert wire.prompt_features_from_pb(wire.prompt_features_to_pb(found)) == found
