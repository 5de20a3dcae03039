"""Makes the messages that open a session's streams from the session's present state. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.protocol.messages import Mode, OpenDraft, OpenVerify, VerifyPolicy

if TYPE_CHECKING:
    from orchestrator.session import Session

POLICIES = {
    Mode.AUTO: VerifyPolicy.PIPELINED,
    Mode.SEQUENTIAL: VerifyPolicy.SEQUENTIAL,
    Mode.OFF: VerifyPolicy.OFF,
}


def open_verify(session: Session, covered: int) -> OpenVerify:
    """The message that opens a verify stream; the session's handle covers the first `covered` tokens."""
    request = session.request
    return OpenVerify(
        request_id=request.request_id,
        model=request.served.model,
        token_ids=tuple(session.committed[covered:]),
        kv_handle=session.handle,
        prompt_length=len(request.prompt),
        sampling=request.sampling_with(session.seed),
        policy=POLICIES[request.mode],
        max_nodes=request.max_nodes,
        vocabulary_hash=request.served.vocabulary_hash,
        first_step=session.step,
        traceparent=session.traceparent,
        task=request.task,
        priority=request.priority,
        lookup=request.mode is Mode.AUTO,
        record_steps=request.record_steps,
        prediction=() if request.mode is Mode.OFF else request.prediction,
        first_prompt_logprob=session.prompt_logprobs_sent,
        seconds_per_token=request.seconds_per_token,
        feature_layers=session.feature_layers,
    )


def open_draft(session: Session, first_node_id: int) -> OpenDraft:
    """The message that opens a draft stream; its node ids begin at `first_node_id`."""
    request = session.request
    return OpenDraft(
        request_id=request.request_id,
        token_ids=tuple(session.committed),
        prompt_length=len(request.prompt),
        sampling=request.sampling_with(session.seed),
        pipelined=request.mode is Mode.AUTO,
        max_nodes=request.max_nodes,
        max_depth=request.max_depth,
        vocabulary_hash=request.served.vocabulary_hash,
        first_node_id=first_node_id,
        first_step=session.step,
        traceparent=session.traceparent,
        task=request.task,
        feature_layers=session.feature_layers,
    )
