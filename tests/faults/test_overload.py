"""More work than there is room for: refused or paused, never wrong, never lost."""

from __future__ import annotations

import grpc
import pytest

from tests.integration.client import AUTO, Client, collect, details, eventually, request, verify_info
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET
from tests.integration.reference import assert_same


@pytest.fixture
def narrow(own_cluster, demo) -> Client:
    """An orchestrator that runs one request, lets one wait and refuses the rest."""
    orchestrator = own_cluster.serve(
        "orchestrator", verify=demo.verify.endpoint, draft=demo.draft("real"), max_running=1, max_queued=1
    ).wait_ready()
    return Client(orchestrator.endpoint)


def test_beyond_the_queue_requests_are_refused(narrow, reference, prompts):
    """RESOURCE_EXHAUSTED with RetryInfo, while accepted requests finish with the right tokens."""
    prompt = prompts(2)[1]
    expected = narrow.generate(prompt, max_tokens=300).tokens
    calls = [narrow.stream(request(prompt, max_tokens=300)) for _ in range(6)]
    finished, refused = [], []
    for call in calls:
        try:
            finished.append(collect(call)[0].tokens)
        except grpc.RpcError as error:
            refused.append(error)
    assert len(finished) >= 2
    assert refused
    for tokens in finished:
        assert_same(reference, prompt, expected, tokens)
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["RetryInfo"].retry_delay.ToNanoseconds() > 0


def test_a_deadline_ends_the_request_and_frees_everything(demo, prompts):
    """DEADLINE_EXCEEDED at the caller, and no session is left behind."""
    with pytest.raises(grpc.RpcError) as caught:
        list(demo.client("real").stream(request(prompts(1)[0], max_tokens=1900), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: verify_info(demo.verify.endpoint).sessions == 0, "the session is closed")


def test_out_of_pages_sessions_wait_and_finish(own_cluster, reference, prompts):
    """With too little KV memory for all, sessions are paused and re-prefilled, and every token is right."""
    verify = own_cluster.serve("verify", model=DEMO_TARGET, dtype="float32", kv_tokens=512)
    draft = own_cluster.serve("draft", model=DEMO_DRAFT, dtype="float32", kv_tokens=512)
    endpoints = {"verify": verify.wait_ready().endpoint, "draft": draft.wait_ready().endpoint}
    client = Client(own_cluster.serve("orchestrator", **endpoints).wait_ready().endpoint)
    chosen = prompts(8)
    expected = [client.generate(prompt, max_tokens=96).tokens for prompt in chosen]
    together = client.generate_all(chosen, 8, mode=AUTO, max_tokens=96)
    for prompt, tokens, generation in zip(chosen, expected, together, strict=True):
        assert_same(reference, prompt, tokens, generation.tokens)
    eventually(
        lambda: verify_info(verify.endpoint).pages_free == verify_info(verify.endpoint).pages,
        "pages are back",
    )
