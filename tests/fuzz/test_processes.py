"""The same against running services with real models, where arithmetic and memory are at stake too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.internal.v1 import draft_pb2, verify_pb2
from tests.fuzz.messages import encoded
from tests.fuzz.profile import LONG
from tests.fuzz.test_fuzz import (
    DRAFT,
    DRAFT_MESSAGES,
    GENERATE,
    PROMPTS,
    VERIFY,
    VERIFY_MESSAGES,
    conversations,
)
from tests.fuzz.world import PATIENCE, settle, stream
from tests.integration.client import draft_info, eventually, verify_info

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
EXAMPLES = max(LONG // 10, 50)


def test_real_services_stand_it(demo: Any) -> None:
    """Each answer is a good status; afterwards a request gives what it gave before, and nothing is held."""
    client = demo.client("real")
    before = client.generate([1, 2, 3], max_tokens=16, temperature=1.0).tokens
    hash_ = verify_info(demo.verify.endpoint).vocabulary_hash
    opening = draft_pb2.DraftRequest.FromString(DRAFT_MESSAGES[0].SerializeToString())
    opening.open.vocabulary_hash = hash_
    verify = [verify_pb2.VerifyRequest.FromString(message.SerializeToString()) for message in VERIFY_MESSAGES]
    talks = st.one_of(
        conversations(verify).map(lambda requests: (demo.verify.endpoint, VERIFY, requests)),
        conversations([opening, *DRAFT_MESSAGES[1:]]).map(lambda says: (demo.draft("real"), DRAFT, says)),
        st.sampled_from(PROMPTS)
        .flatmap(encoded)
        .map(lambda request: (demo.orchestrator("real").endpoint, GENERATE, [request])),
    )

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(talk=talks)
    def fuzz(talk: tuple[str, str, list[bytes]]) -> None:
        asyncio.run(_talk(*talk))

    fuzz()
    assert client.generate([1, 2, 3], max_tokens=16, temperature=1.0).tokens == before
    eventually(lambda: verify_info(demo.verify.endpoint).sessions == 0, "the verify service is idle")
    eventually(lambda: draft_info(demo.draft("real")).sessions == 0, "the draft service is idle")
    for process in demo.cluster.processes:
        if not process.running:
            continue
        lines = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
        assert [line for line in lines if line["level"] in ("error", "critical")] == []


async def _talk(endpoint: str, method: str, requests: list[bytes]) -> None:
    if method != GENERATE:
        await stream(endpoint, method, requests)
        return

    def generate() -> None:
        with grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            for _ in channel.unary_stream(method)(requests[0], timeout=PATIENCE):
                pass

    await settle(asyncio.to_thread(generate))
