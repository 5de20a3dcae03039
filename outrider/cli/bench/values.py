"""Values of flags. Each raises `argparse.ArgumentTypeError` with what the text must be. Pure."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any
from urllib.parse import urlsplit

from outrider.cli.bench.slo import Slo, parse_slo


def url(text: str) -> str:
    """The address of an API, without a slash at its end."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        good = good and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        good = False
    if not good or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must be such as http://host:8000/v1, not {text!r}")
    return text.rstrip("/")


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _at_least(1, text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, not {text!r}")
    return value


def rate(text: str) -> float:
    """A number above 0, or infinity."""
    rate = _number(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0 or inf, not {text!r}")
    return rate


def share(text: str) -> float:
    """A number from 0 to 1."""
    share = _number(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")
    return share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value


def slo(text: str) -> Slo:
    """See `parse_slo`."""
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
