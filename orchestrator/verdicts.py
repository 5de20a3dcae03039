"""Checks whether what a verify replica sent can be right."""

from __future__ import annotations

from orchestrator.request.resolver import ResolvedRequest
from outrider.protocol.messages import MAX_STEP_NODES, FinishReason, PromptLogprobs, Verdict


def prompt_problem_of(part: PromptLogprobs, request: ResolvedRequest, expected: int) -> str:
    """Why these cannot be the prompt's log probabilities from position `expected` on; empty when they can."""
    if request.sampling.prompt_logprobs is None:
        return "log probabilities of the prompt that nobody asked for"
    tokens = tuple(logprob.token for logprob in part.logprobs)
    if part.position != expected or tokens != request.prompt[expected : expected + len(tokens)] or not tokens:
        return f"log probabilities that are not those of the prompt from position {expected} on"
    return ""


def problem_of(verdict: Verdict, request: ResolvedRequest, committed_length: int, step: int) -> str:
    """Why a verdict cannot follow `committed_length` tokens and `step` steps of a request; empty when it can.

    A sound verdict commits tokens or ends the generation, so no replica can go on for ever.
    """
    if verdict.base_length != committed_length:
        return f"verdict for length {verdict.base_length} where {committed_length} tokens are committed"
    if not verdict.tokens and verdict.finish_reason is FinishReason.NONE:
        return "verdict without tokens"
    if verdict.tokens and max(verdict.tokens) >= request.served.vocabulary_size:
        return f"verdict with token {max(verdict.tokens)} outside the vocabulary"
    if verdict.step <= step:
        return f"verdict of step {verdict.step} after step {step}"
    if not _counts_fit(verdict):
        return "verdict whose counts contradict each other"
    continues = verdict.finish_reason is FinishReason.NONE
    if committed_length + len(verdict.tokens) + continues > request.max_length:
        return f"verdict that does not end at {request.max_length} tokens"
    return ""


def _counts_fit(verdict: Verdict) -> bool:
    return (
        verdict.verified <= MAX_STEP_NODES
        and verdict.accepted <= min(verdict.verified, len(verdict.tokens))
        and verdict.predicted_accepted <= verdict.predicted <= verdict.verified
    )
