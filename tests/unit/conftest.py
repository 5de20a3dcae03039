"""Fixtures of several rooms' unit tests. They import what they need themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.unit.client.fake_orchestrator import FakeOrchestrator


@pytest.fixture
def fake() -> Iterator[FakeOrchestrator]:
    """A fake orchestrator that knows its endpoint."""
    from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving

    with serving(FakeOrchestrator()) as (made, endpoint):
        made.endpoint = endpoint
        yield made


@pytest.fixture
def orchestrator(fake: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch) -> FakeOrchestrator:
    """A fake orchestrator where the command finds it."""
    monkeypatch.setenv("OUTRIDER_ENDPOINT", fake.endpoint)
    return fake


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Recording is on; what is recorded lands here."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.telemetry import spans

    memory = InMemorySpanExporter()
    spans.use_processor("verify", "verify-0", SimpleSpanProcessor(memory))
    yield memory
    spans.shutdown_tracing()
