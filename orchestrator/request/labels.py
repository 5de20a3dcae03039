"""Checks the labels that callers put on requests."""

from __future__ import annotations

import re
from collections.abc import Mapping

from outrider.protocol.errors import InvalidRequest

MAX_LABELS = 8
"""Most labels of a request. They are counted when the message is read."""
MAX_VALUE = 64
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. Prometheus refuses a whole page that has one, and terminals obey them."""


def check_labels(labels: Mapping[str, str]) -> None:
    """Check that the labels can be used in metrics.

    Raises:
        InvalidRequest: a name or a value does not have the required form.
    """
    for name, value in labels.items():
        if not NAME.fullmatch(name):
            said = "is not a name; use up to 32 small letters, digits and _, a letter first"
            raise InvalidRequest(f"labels[{name[:40]!r}]", said)
        if not 1 <= len(value) <= MAX_VALUE:
            raise InvalidRequest(f"labels[{name!r}]", f"must have 1 to {MAX_VALUE} characters")
        check_printable(f"labels[{name!r}]", value)


def check_printable(field: str, value: str) -> None:
    """Check that a text of the caller can be shown in metrics, log lines and terminals.

    Raises:
        InvalidRequest: it has a control character.
    """
    if found := CONTROL.search(value):
        raise InvalidRequest(field, f"must not have control characters such as {found[0]!r}")
