"""Admits sessions: checks the first message against what is served, and gives the session a place."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort

from outrider.protocol.allowance import MAX_FEATURE_LAYERS
from outrider.protocol.errors import ContextTooLong, InvalidRequest, MismatchedPair, Overloaded, UnknownModel
from outrider.protocol.messages import ModelInfo, OpenVerify
from outrider.protocol.vocabulary import check_vocabulary
from verify_service.session import end_length

MAX_FIRST_STEP = 2**31
"""Largest number of the first step. Steps have 32 bits on the wire, and a session may need as many steps as
its context has tokens."""


class Places:
    """Places for the sessions of a replica, and a line in which equally many openings may wait for a place.

    An orchestrator sends only what it knows to fit. More comes when several orchestrators share the replica:
    the line, ordered by priority and then by arrival, gives each of them its turn.
    """

    def __init__(self, max_sessions: int) -> None:
        self.taken = 0
        self._max_sessions = max_sessions
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @property
    def waiting(self) -> int:
        """Number of openings in the line."""
        return len(self._line)

    async def take(self, priority: int) -> None:
        """Wait for a place and take it; a call that is cancelled meanwhile leaves the line.

        Raises:
            Overloaded: the line is full.
        """
        if self.taken < self._max_sessions:
            self.taken += 1
            return
        if self.waiting >= self._max_sessions:
            raise Overloaded(f"{self.taken} sessions are open and {self.waiting} wait, the limit; try later")
        turn = asyncio.get_running_loop().create_future()
        waiting = (-priority, next(self._arrivals), turn)
        insort(self._line, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
            elif not turn.cancelled():  # the place came at the same moment
                self.free()
            raise

    def free(self) -> None:
        """Give a place back: to the first in the line."""
        while self._line:
            *_, turn = self._line.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1


def check_open(opening: OpenVerify, info: ModelInfo) -> None:
    """Check the first message of a session.

    Raises:
        UnknownModel: another model is asked for.
        MismatchedPair: the caller works with another vocabulary.
        ContextTooLong: the context has no room for another token.
        InvalidRequest: a field is out of its range.
    """
    if opening.model not in ("", info.model):
        raise UnknownModel(opening.model, info.model)
    if opening.vocabulary_hash not in ("", info.vocabulary_hash):
        raise MismatchedPair(
            f"vocabulary_hash: {opening.vocabulary_hash!r} is not that of {info.model!r}, which is "
            f"{info.vocabulary_hash!r}; use a tokenizer and a draft of the same vocabulary"
        )
    check_vocabulary("token_ids", opening.token_ids, info.vocabulary_size)
    check_vocabulary("prediction", opening.prediction, info.vocabulary_size)
    if len(opening.prediction) > info.context_length:
        raise InvalidRequest("prediction", f"must have at most {info.context_length} tokens")
    check_vocabulary("sampling.stop_token_ids", opening.sampling.stop_token_ids, info.vocabulary_size)
    check_vocabulary("sampling.logit_bias", opening.sampling.logit_bias, info.vocabulary_size)
    _check_lengths(opening, info.context_length)
    _check_constraint(opening)
    in_prompt = opening.first_prompt_logprob < opening.prompt_length
    if in_prompt and opening.kv_handle is not None and opening.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "kv_handle", "its tokens are not computed again for prompt_logprobs; leave it out"
        )
    _check_layers(opening.feature_layers, info.num_layers)
    if opening.first_step > MAX_FIRST_STEP:
        raise InvalidRequest("first_step", f"must be at most {MAX_FIRST_STEP}, not {opening.first_step}")


def _check_layers(layers: tuple[int, ...], count: int) -> None:
    if (
        len(layers) > MAX_FEATURE_LAYERS
        or list(layers) != sorted(set(layers))
        or max(layers, default=-1) > count
    ):
        raise InvalidRequest(
            "feature_layers",
            f"must be at most {MAX_FEATURE_LAYERS} layers up to {count}, ascending: {layers}",
        )


def generated_tokens(opening: OpenVerify) -> tuple[int, ...]:
    """Return the tokens after the prompt, of an opening that passed `check_open`."""
    return opening.token_ids[max(opening.prompt_length - opening.covered, 0) :]


def _check_constraint(opening: OpenVerify) -> None:
    """Check that the handle covers no generated token: the grammar has to go through all of them."""
    if opening.sampling.constraint is not None and opening.covered > opening.prompt_length:
        raise InvalidRequest("kv_handle", "must cover no more than the prompt where there is a constraint")


def _check_lengths(opening: OpenVerify, context_length: int) -> None:
    if not opening.token_ids:
        raise InvalidRequest("token_ids", "must not be empty; one token must follow those of kv_handle")
    length = opening.covered + len(opening.token_ids)
    if opening.all_token_ids and opening.kv_handle is not None and opening.kv_handle.length >= length:
        raise InvalidRequest("token_ids", "must have a token that kv_handle does not cover")
    if not 1 <= opening.prompt_length <= length:
        raise InvalidRequest("prompt_length", f"must be 1 to {length}, not {opening.prompt_length}")
    if length >= context_length:
        raise ContextTooLong("token_ids", f"{length} tokens leave no room in a context of {context_length}")
    if length >= end_length(opening, context_length):
        generated = length - opening.prompt_length
        raise InvalidRequest("sampling.max_tokens", f"{generated} tokens are generated already")
