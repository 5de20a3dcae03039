"""The id of a request in logs, traces and answers: the caller's own, if it is usable."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "x-request-id"
CURRENT: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task answers, once its handler has set it; errors carry it."""
USABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""Ids whose characters have no special meaning in logs or headers."""


def request_id_of(given: str) -> str:
    """The caller's id; a new one if it gave none, or one that is not usable."""
    return given if USABLE.fullmatch(given) else secrets.token_hex(8)
