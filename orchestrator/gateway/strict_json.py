"""Reads JSON without the numbers that Python's parser takes or makes and that JSON cannot write."""

from __future__ import annotations

import json
import math
from typing import Any


class NoNumber(ValueError):
    """A number that JSON cannot write: NaN, or an infinite one."""


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        NoNumber: a number is not finite.
        ValueError: the text is no JSON, or a number has too many digits.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> Any:
    raise NoNumber(f"{constant} is not a JSON number")


def _finite(number: str) -> float:
    found = float(number)
    if math.isinf(found):
        raise NoNumber(f"{number} is too large a number")
    return found
