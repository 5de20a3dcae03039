"""Values of flags. Each raises `argparse.ArgumentTypeError` with what the text must be. Pure."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from outrider.config import checked_device, checked_layers


def url(text: str) -> str:
    """The address of an API, without a slash at its end."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        good = good and not ("@" in parts.netloc or parts.query or parts.fragment)
    except ValueError:
        good = False
    if not good or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must be such as http://host:8000/v1, not {text!r}")
    return text.rstrip("/")


def at_least(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Reads a whole number from `minimum` to `maximum`."""
    wanted = f"{minimum} or more" if maximum == math.inf else f"{minimum} to {maximum}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number of {wanted}, not {text!r}")
        return value

    return read


whole = at_least(0)
count = at_least(1)


def rate(text: str) -> float:
    """A number above 0, or infinity."""
    return _checked(text, "a number above 0 or inf", lambda value: value > 0)


def positive(text: str) -> float:
    """A number above 0."""
    return _checked(text, "a number above 0, at most 1e12", lambda value: 0 < value <= 1e12)


def seconds(text: str) -> float:
    """A time above 0."""
    return _checked(text, "a number of seconds above 0", lambda value: 0 < value < math.inf)


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    return _checked(text, "a number of 0 or more", lambda value: 0 <= value < math.inf)


def part(text: str) -> float:
    """A number above 0 and below 1."""
    return _checked(text, "a number between 0 and 1", lambda value: 0 < value < 1)


def _checked(text: str, wanted: str, is_sound: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_sound(value):
        raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
    return value


def device(text: str) -> str:
    """The name of a device."""
    return _as_setting(text, checked_device)


def layers(text: str) -> str:
    """A list of layers."""
    return _as_setting(text, checked_layers)


def _as_setting(text: str, check: Callable[[str], str]) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value
