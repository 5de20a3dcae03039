"""What the gateway counts of the requests that it answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from orchestrator.gateway.instruments import GatewayInstruments
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Http, rig
from tests.unit.orchestrator.gateway.test_figures import end

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "count"}


async def test_what_is_counted(fake: FakeOrchestrator) -> None:
    """Requests by endpoint and status, tokens, and acceptance under vLLM's names too."""
    async with rig(fake.endpoint) as made:
        http: Http = made.http
        await http.post(COMPLETIONS, PROMPT)
        await http.post(COMPLETIONS, b"{")
        await http.get("/health")
        page = b"".join((await http.get("/metrics")).parts).decode()
    for line in (
        'outrider_gateway_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'outrider_gateway_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        "outrider_gateway_tokens_total 3.0",
        "outrider_gateway_time_to_first_token_seconds_count 1.0",
        'vllm:spec_decode_num_drafts_total{model_name="demo"} 1.0',
    ):
        assert line in page
    assert "/health" not in page  # what probes and scrapes ask for is not counted


def test_acceptance_by_position() -> None:
    """A step that accepted three candidates counts at the first three positions, under vLLM's name."""
    registry = CollectorRegistry()
    made = GatewayInstruments(registry)
    made.completed(end(histogram=(4, 1, 0, 3)))
    made.completed(end(histogram=(0, 2)))
    made.completed(end())
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found = [registry.get_sample_value(name, {"model_name": "m", "position": str(at)}) for at in range(4)]
    assert found == [6.0, 3.0, 3.0, None]


async def test_speculation_is_counted_from_zero_once_the_models_are_listed(fake: FakeOrchestrator) -> None:
    """`vllm bench serve` lists them first, and prints no acceptance if there is nothing to subtract."""
    async with rig(fake.endpoint) as made:
        await made.http.get("/v1/models")
        page = b"".join((await made.http.get("/metrics")).parts).decode()
    assert 'vllm:spec_decode_num_drafts_total{model_name="demo"} 0.0' in page
