"""How many examples: few and always the same ones by default, many new ones with `pytest -m slow`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

LONG = int(os.environ.get("FUZZ_EXAMPLES", "2000"))
_COMMON: dict[str, Any] = {
    "deadline": None,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}


def fuzzed(short: int, *arguments: Any, **strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Run a test on `short` derandomized examples, and marked slow on LONG random ones."""

    def decorate(test: Callable[..., None]) -> Any:
        quick = settings(max_examples=short, derandomize=True, database=None, **_COMMON)
        long = settings(max_examples=LONG, derandomize=False, print_blob=True, database=None, **_COMMON)
        profiles = [
            pytest.param(quick, id="short"),
            pytest.param(long, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        ]

        @pytest.mark.parametrize("profile", profiles)
        def case(profile: settings, world: Any) -> None:
            profile(given(*arguments, **strategies)(test))(world)

        case.__name__, case.__doc__, case.__module__ = test.__name__, test.__doc__, test.__module__
        return case

    return decorate
