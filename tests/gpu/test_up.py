"""The services on a CUDA device."""

from __future__ import annotations

import pytest

NEEDED = ("google.rpc", "grpc", "opentelemetry.sdk", "pydantic", "structlog")
"""What services need and the other tests of this folder do not."""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """`outrider up` with both models on one device."""
    for package in NEEDED:
        pytest.importorskip(package)
    from tests.integration.client import Client
    from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster

    cluster = Cluster(tmp_path_factory.mktemp("up"))
    pair = ("--target", str(DEMO_TARGET), "--draft", str(DEMO_DRAFT), "--dtype", "bfloat16")
    devices = ("--device", "cuda:0", "--draft-device", "cuda:0")
    process = cluster.launch("up", *pair, *devices, "--port", "0", "--http-port", "0").wait_ready()
    yield Client(process.endpoint)
    cluster.stop()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}])
def test_up_generates_on_a_gpu(client, prompts, sampling):
    """Drafts are accepted, and the text begins as it does without them (later a rounding tie may differ)."""
    from tests.integration.client import AUTO, OFF, eventually

    prompt = prompts(2)[1]
    plain = client.generate(prompt, mode=OFF, max_tokens=32, **sampling).tokens

    def accepted() -> bool:
        found = client.generate(prompt, mode=AUTO, max_tokens=32, **sampling)
        assert len(found.tokens) == 32
        assert found.tokens[:4] == plain[:4]
        return found.statistics.accepted > 0

    eventually(accepted, "a drafted token is accepted")
