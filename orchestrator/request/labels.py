"""Checks the labels that callers put on requests."""

from __future__ import annotations

import re
from collections.abc import Mapping

from outrider.protocol.errors import InvalidRequest

MAX_LABELS = 8
"""Counted where the message is read."""
MAX_VALUE = 64
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Whether the labels can be counted by.

    Raises:
        InvalidRequest: one is not of the form.
    """
    for name, value in labels.items():
        if not NAME.fullmatch(name):
            said = "is no name; use up to 32 small letters, digits and _, a letter first"
            raise InvalidRequest(f"labels[{name[:40]!r}]", said)
        if not 1 <= len(value) <= MAX_VALUE:
            raise InvalidRequest(f"labels[{name!r}]", f"must have 1 to {MAX_VALUE} characters")
