"""The id of a request in logs, traces and answers: its caller's, where that can be one."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "x-request-id"
CURRENT: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task answers, once its handler has set it; errors carry it."""
USABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""Signs that neither a log nor a header takes for anything else."""


def request_id_of(given: str) -> str:
    """The caller's id as it is; a new one where it gave none, or one that cannot be kept."""
    return given if USABLE.fullmatch(given) else secrets.token_hex(8)
