"""Reads the metadata that a caller sends with its messages."""

from __future__ import annotations

from typing import Any

import grpc


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """The first text under a key; empty if there is none."""
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""
