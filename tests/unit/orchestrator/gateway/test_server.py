"""What uvicorn is told."""

from __future__ import annotations

import pytest

from orchestrator.gateway.server import server_config


@pytest.mark.parametrize(("given", "told"), [(0.0, 0), (0.5, 1), (30.0, 30)])
def test_a_part_of_a_second_is_waited_for(given: float, told: int) -> None:
    """uvicorn takes whole seconds: half of one is no reason to cut requests off at once."""
    assert server_config(None, 1, given).timeout_graceful_shutdown == told
