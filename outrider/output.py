"""Standard output whose reader may have gone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def announce(ready: Mapping[str, Any]) -> None:
    """Print the line that a service is ready, for the process that started it.

    If that has gone, the service serves on.
    """
    try:
        print(json.dumps(ready), flush=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discard buffered output, which Python would try to write at its exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
