"""The life of a process: health while it works, drain, refusals at start."""

from __future__ import annotations

import signal
import time
from statistics import median

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.integration.client import Client, collect, request
from tests.integration.cluster import DEMO_TARGET
from tests.integration.prompts import long_prompt
from tests.integration.reference import assert_same
from tests.integration.test_distribution import tiny_llama

SERVING = health_pb2.HealthCheckResponse.SERVING


def health_of(endpoint: str, service: str = "") -> tuple[int, float]:
    """Status, and seconds until it came."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        started = time.monotonic()
        status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
        return status, time.monotonic() - started


def test_health_answers_at_once_while_a_step_runs(demo):
    """In the median under 50 ms while the engine is busy with long prefills."""
    client = demo.client("none")
    calls = [client.stream(request(long_prompt(1500)[offset:], max_tokens=60)) for offset in range(4)]
    times = []
    for _ in range(20):
        status, seconds = health_of(demo.verify.endpoint)
        assert status == SERVING
        times.append(seconds)
    for call in calls:
        collect(call)
    assert median(times) < 0.05, times


@pytest.mark.parametrize(
    ("kind", "service"),
    [
        ("orchestrator", "outrider.v1.GenerationService"),
        ("verify", "outrider.internal.v1.VerifyService"),
        ("draft", "outrider.internal.v1.DraftService"),
    ],
)
def test_every_service_has_health_and_tells_nobody_what_else_it_has(demo, kind, service):
    """Each service answers health under its name; reflection is off unless it is asked for."""
    orchestrator = demo.orchestrator("real").endpoint
    endpoint = {"orchestrator": orchestrator, "verify": demo.verify.endpoint, "draft": demo.draft("real")}[
        kind
    ]
    assert health_of(endpoint, service)[0] == SERVING
    with pytest.raises(grpc.RpcError) as refused:
        _listed(endpoint)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_service_that_is_asked_to_lists_itself_by_reflection(own_cluster):
    """With `--reflection`."""
    draft = own_cluster.serve("draft", kind="lookup", reflection=True).wait_ready()
    assert "outrider.internal.v1.DraftService" in _listed(draft.endpoint)


def _listed(endpoint):
    """What reflection says is served."""
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        [answer] = stub.ServerReflectionInfo(iter([listing]), timeout=5)
    return [one.name for one in answer.list_services_response.service]


@pytest.mark.parametrize("kind", ["orchestrator", "verify"])
def test_sigterm_finishes_running_requests(own_cluster, demo, reference, prompts, kind):
    """After SIGTERM the running request ends with all its tokens, new ones are refused, and the exit is 0."""
    prompt = prompts(9)[8]
    verify = own_cluster.serve("verify", model=DEMO_TARGET, dtype="float32").wait_ready()
    orchestrator = own_cluster.serve("orchestrator", verify=verify.endpoint).wait_ready()
    client = Client(orchestrator.endpoint)
    call = client.stream(request(prompt, max_tokens=200))
    responses = [next(call)]
    process = {"orchestrator": orchestrator, "verify": verify}[kind]
    process.signal(signal.SIGTERM)
    responses += list(call)
    assert_same(reference, prompt, reference.greedy(prompt, 200), collect(responses)[0].tokens)
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stream(request(prompt, max_tokens=4), timeout=2))
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert process.wait(20) == 0


def test_a_mismatched_draft_is_refused_and_the_request_goes_on(
    own_cluster, demo, reference, prompts, tmp_path
):
    """A draft with another vocabulary is kept out with a sentence in the log; the tokens come without it."""
    wrong = own_cluster.serve(
        "draft", model=tiny_llama(tmp_path / "wrong", 1, 8), dtype="float32"
    ).wait_ready()
    orchestrator = own_cluster.serve(
        "orchestrator", verify=demo.verify.endpoint, draft=wrong.endpoint
    ).wait_ready()
    prompt = prompts(2)[1]
    generation = Client(orchestrator.endpoint).generate(prompt, max_tokens=16)
    assert_same(reference, prompt, reference.greedy(prompt, 16), generation.tokens)
    assert generation.statistics.draft_micros == 0
    assert "vocabulary" in orchestrator.tail(100_000)


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (("serve", "verify", "--model", "/no/such/model"), {}, "/no/such/model"),
        (("serve", "verify"), {}, "model"),
        (("serve", "orchestrator"), {}, "verify"),
        (("serve", "orchestrator", "--port", "99999"), {}, "port"),
        (("serve", "draft", "--kind", "magic"), {}, "kind"),
        (("serve", "verify", "--no-such-flag", "1"), {}, "no-such-flag"),
        (
            ("serve", "orchestrator", "--verify", "x:1"),
            {"OUTRIDER_ORCHESTRATOR_MAX_RUNNING": "many"},
            "OUTRIDER_ORCHESTRATOR_MAX_RUNNING",
        ),
    ],
)
def test_a_bad_setting_ends_the_process_at_start(own_cluster, arguments, environment, complaint):
    """Exit status 2 and one sentence that names what to change; no traceback."""
    process = own_cluster.launch(*arguments, environment=environment)
    assert process.wait(60) == 2
    assert complaint in process.tail()
    assert "Traceback" not in process.tail()


def test_a_taken_port_ends_the_process_at_start(own_cluster, demo):
    """Two servers on one port: the second one says so."""
    port = demo.orchestrator("none").endpoint.rpartition(":")[2]
    process = own_cluster.launch("serve", "orchestrator", "--port", port, "--verify", demo.verify.endpoint)
    assert process.wait(60) == 2
    assert port in process.tail()
