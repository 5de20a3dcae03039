"""Checks a session's messages: its opening, verdicts without a gap, features that its drafter can read."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.allowance import row_bytes
from outrider.protocol.errors import InvalidRequest, MismatchedPair
from outrider.protocol.messages import ModelInfo, OpenDraft, PromptFeatures, Verdict
from outrider.protocol.vocabulary import check_vocabulary
from outrider.speculation.candidate_tree import FIRST_OWN_ID

MAX_MISSING = 4
"""Most verdicts in a row that may want a draft and bring it no features to read."""


def check_open(request: OpenDraft, info: ModelInfo) -> None:
    """Check the first message of a session against what is served.

    Raises:
        InvalidRequest: a field is out of its range.
        MismatchedPair: the target has another vocabulary.
    """
    if info.vocabulary_hash and request.vocabulary_hash != info.vocabulary_hash:
        raise MismatchedPair(
            f"vocabulary_hash: the target's is {request.vocabulary_hash!r} and that of draft model "
            f"{info.model!r} is {info.vocabulary_hash!r}; use a draft with the target's tokenizer"
        )
    _check_tokens("token_ids", request.token_ids, info.vocabulary_size)
    length = len(request.token_ids)
    if not 1 <= request.prompt_length <= length:
        raise InvalidRequest("prompt_length", f"must be 1 to {length}, not {request.prompt_length}")
    if request.first_node_id >= FIRST_OWN_ID:
        raise InvalidRequest("first_node_id", f"must be below {FIRST_OWN_ID}, not {request.first_node_id}")
    check_vocabulary("sampling.logit_bias", request.sampling.logit_bias, info.vocabulary_size)


def _check_tokens(field: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    if not tokens:
        raise InvalidRequest(field, "must not be empty")
    check_vocabulary(field, tokens, vocabulary_size)


class VerdictCheck:
    """Follows a session's committed length, so that no verdict with a gap reaches the engine."""

    def __init__(self, request: OpenDraft, info: ModelInfo) -> None:
        self._length = len(request.token_ids)
        self._step = request.first_step
        self._features = FeatureCheck(request, info)
        self._vocabulary_size = info.vocabulary_size
        self._end = request.sampling.end_length(request.prompt_length)

    def accept(self, verdict: Verdict) -> None:
        """Take a verdict into account.

        Raises:
            InvalidRequest: the verdict does not continue the committed tokens; open a new session with all
            tokens.
        """
        if verdict.base_length != self._length:
            problem = f"is {verdict.base_length}, but {self._length} tokens are committed here"
            raise InvalidRequest("verdict.base_length", f"{problem}; open a new session")
        if verdict.step <= self._step:
            raise InvalidRequest("verdict.step", f"must be above {self._step}, not {verdict.step}")
        _check_tokens("verdict.tokens", verdict.tokens, self._vocabulary_size)
        if self._length + len(verdict.tokens) > self._end:
            raise InvalidRequest("verdict.tokens", f"go beyond the {self._end} that the session may have")
        self._features.verdict(verdict)
        self._length += len(verdict.tokens)
        self._step = verdict.step

    def accept_features(self, part: PromptFeatures) -> None:
        """Take features of the text into account.

        Raises:
            InvalidRequest: see `FeatureCheck.prompt`.
        """
        self._features.prompt(part, self._length)


class FeatureCheck:
    """Follows the features that a session gets. A session that was not promised the drafter's layers gets
    none."""

    def __init__(self, request: OpenDraft, info: ModelInfo) -> None:
        layers = request.feature_layers
        self._row = row_bytes(len(layers), info.hidden_size) if info.reads(layers) else 0
        self._missing = 0

    def verdict(self, verdict: Verdict) -> None:
        """Take a verdict into account.

        Raises:
            InvalidRequest: its features are not whole rows, are more than its tokens, or have long been
            missing.
        """
        self._check("verdict.features", verdict.features, len(verdict.tokens))
        missing = self._row and verdict.draft_wanted and not verdict.features
        self._missing = self._missing + 1 if missing else 0
        if self._missing > MAX_MISSING:
            raise InvalidRequest(
                "verdict.features", f"were missing {self._missing} times; use verify replicas that tell them"
            )

    def prompt(self, part: PromptFeatures, length: int) -> None:
        """Take features of a text of `length` tokens into account.

        Raises:
            InvalidRequest: they are not whole rows, or not of this text.
        """
        if not self._row or not part.rows:
            raise InvalidRequest("prompt_features", "must be left out: the session reads none")
        if not 1 <= part.position < length:
            raise InvalidRequest(
                "prompt_features.position", f"must be 1 to {length - 1}, not {part.position}"
            )
        self._check("prompt_features.rows", part.rows, length - part.position)

    def _check(self, field: str, rows: bytes, max_rows: int) -> None:
        """Refuse rows of a wrong size or number, and any rows if the session reads none."""
        if rows and (not self._row or len(rows) % self._row or len(rows) > max_rows * self._row):
            raise InvalidRequest(
                field, f"must be up to {max_rows} rows of {self._row} bytes, not {len(rows)} bytes"
            )
