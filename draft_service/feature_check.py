"""Checks a session's features: as many rows as tokens, as wide as the layers that its drafter reads."""

from __future__ import annotations

from outrider.protocol.allowance import row_bytes
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import ModelInfo, OpenDraft, PromptFeatures, Verdict

MAX_MISSING = 4
"""Verdicts in a row that want a draft and bring it nothing to read."""


class FeatureCheck:
    """Follows what one session is told; a session that was not promised the drafter's layers is told
    nothing."""

    def __init__(self, request: OpenDraft, info: ModelInfo) -> None:
        reads = info.feature_layers and set(info.feature_layers) <= set(request.feature_layers)
        self._row = row_bytes(len(request.feature_layers), info.hidden_size) if reads else 0
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
        """Take features of a text of so many tokens into account.

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
        """Where the session reads nothing, nothing may come."""
        if rows and (not self._row or len(rows) % self._row or len(rows) > max_rows * self._row):
            raise InvalidRequest(
                field, f"must be up to {max_rows} rows of {self._row} bytes, not {len(rows)} bytes"
            )
