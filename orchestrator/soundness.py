"""Checks whether a verify replica's messages can be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.events import FeaturesArrived, PromptArrived, VerdictArrived, VerifyFailed, VerifyOpened
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.streams import VerifyStream
from outrider.protocol.messages import MAX_STEP_NODES, FinishReason, PromptLogprobs, Verdict

if TYPE_CHECKING:
    from orchestrator.session import Session

VerifyEvent = VerifyOpened | VerdictArrived | PromptArrived | FeaturesArrived | VerifyFailed


def problem_of(event: VerifyEvent, session: Session, verify: VerifyStream) -> str:
    """Why an event of this stream cannot come from a sound replica; empty when it can."""
    match event:
        case VerifyFailed():
            return ""
        case VerifyOpened():
            return "opened twice" if verify.opened else ""
        case FeaturesArrived(_, part):
            sound = session.feature_layers and verify.takes(part, len(session.committed))
            return "" if sound else f"features from {part.position} on that are not expected"
        case _ if not verify.opened:
            return "results before the session was opened"
        case PromptArrived(_, found):
            return prompt_problem_of(found, session.request, session.prompt_logprobs_sent)
        case VerdictArrived(_, verdict):
            if session.prompt_logprobs_sent < session.request.prompt_logprobs:
                return "verdict before all log probabilities of the prompt"
            return _verdict_problem_of(verdict, session)


def prompt_problem_of(part: PromptLogprobs, request: ResolvedRequest, expected: int) -> str:
    """Why these cannot be the prompt's log probabilities from position `expected` on; empty when they can."""
    if request.sampling.prompt_logprobs is None:
        return "log probabilities of the prompt that were not asked for"
    tokens = tuple(logprob.token for logprob in part.logprobs)
    if part.position != expected or tokens != request.prompt[expected : expected + len(tokens)] or not tokens:
        return f"log probabilities that are not those of the prompt from position {expected} on"
    return ""


def _verdict_problem_of(verdict: Verdict, session: Session) -> str:
    """Why a verdict cannot be right; empty when it can.

    It must commit tokens or end the generation, so no replica can go on for ever.
    """
    committed, continues = len(session.committed), verdict.finish_reason is FinishReason.NONE
    if verdict.base_length != committed:
        return f"verdict for length {verdict.base_length} where {committed} tokens are committed"
    if not verdict.tokens and continues:
        return "verdict without tokens"
    if max(verdict.tokens, default=0) >= session.request.served.vocabulary_size:
        return f"verdict with token {max(verdict.tokens)} outside the vocabulary"
    wanted = verdict.tokens if session.request.sampling.logprobs is not None else ()
    if tuple(logprob.token for logprob in verdict.logprobs) != wanted:
        return "verdict whose log probabilities are not those of its tokens"
    if verdict.step <= session.step:
        return f"verdict of step {verdict.step} after step {session.step}"
    if not _counts_fit(verdict):
        return "verdict whose counts contradict each other"
    if committed + len(verdict.tokens) + continues > session.request.max_length:
        return f"verdict that does not end at {session.request.max_length} tokens"
    return ""


def _counts_fit(verdict: Verdict) -> bool:
    return (
        verdict.verified <= MAX_STEP_NODES
        and verdict.accepted <= min(verdict.verified, len(verdict.tokens))
        and verdict.predicted_accepted <= verdict.predicted <= verdict.verified
    )
