"""What the tests of the gateway share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving


@pytest.fixture
def fake() -> Iterator[FakeOrchestrator]:
    """A fake orchestrator that knows its endpoint."""
    with serving(FakeOrchestrator()) as (made, endpoint):
        made.endpoint = endpoint
        yield made
