"""The pods of dev-cpu with TLS everywhere, as processes that see only what the manifests give them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.certificates import authority, issue
from tests.k8s.manifests import K8S, ROOT, Manifests, compose
from tests.k8s.pods import Pod, client, network, possible, secret_mounts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not possible(), reason="network namespaces need root and iproute2 (apt-get install iproute2)"
    ),
]
TOKEN = "a-token-of-the-test"
REQUEST = ("def fibonacci(n):", "--endpoint", "orchestrator:7700", "--ignore-eos", "--max-tokens", "400")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For manifests, Secrets and logs."""
    return tmp_path_factory.mktemp("pods")


@pytest.fixture(scope="module")
def manifests(folder: Path) -> Manifests:
    """The demo pair with mutual TLS inside and TLS and tokens at the edge."""
    return compose(K8S / "overlays/dev-cpu", ("mtls", "edge"), folder)


@pytest.fixture(scope="module")
def secrets(folder: Path) -> dict[str, Path]:
    """The Secrets as docs/kubernetes.md lists them, as folders."""
    ca = authority(folder / "authority")
    names = {
        "verify-tls": "verify",
        "draft-tls": "draft",
        "orchestrator-client-tls": "client",
        "orchestrator-tls": "orchestrator",
    }
    made = {secret: issue(ca, folder / secret, name) for secret, name in names.items()}
    tokens = folder / "orchestrator-tokens"
    tokens.mkdir()
    (tokens / "tokens").write_text(f"{TOKEN}\n")
    return made | {"orchestrator-tokens": tokens}


@pytest.fixture(scope="module")
def pods(folder: Path, manifests: Manifests, secrets: dict[str, Path]) -> Iterator[dict[str, Pod]]:
    """All three, started in the order in which they need each other least: the target last."""
    with ExitStack() as stack:
        stack.enter_context(network())
        started: dict[str, Pod] = {}
        for service in ("orchestrator", "draft", "verify"):
            mounts = secret_mounts(manifests, service, secrets) | {"/models": ROOT / "models/demo"}
            started[service] = Pod(manifests, service, mounts, folder)
            stack.callback(started[service].kill)
            if service == "orchestrator":
                started[service].until(lambda: started["orchestrator"].probe("startup"))
                assert not started[service].probe("readiness"), "there is no target yet"
        for one in started.values():
            one.until(lambda one=one: one.probe("startup") and one.probe("readiness"))  # type: ignore[misc]
        yield started


def test_pods_serve_and_drain(pods: dict[str, Pod], folder: Path, secrets: dict[str, Path]) -> None:
    """They find each other by name, trust each other's certificates, use drafts, refuse a caller without a
    token, and end with status 0 in the middle of a request, whose text is what it was before."""
    trust = ("--tls-ca", str(secrets["orchestrator-tls"] / "ca.crt"))
    output, errors = client(folder, *REQUEST, *trust, "--json", token=TOKEN).communicate(timeout=120)
    answer = json.loads(output or errors)
    assert answer["speculation"]["accepted"] > 0
    stranger = client(folder, *REQUEST, *trust)
    assert stranger.wait(60) != 0
    running = client(folder, *REQUEST, *trust, token=TOKEN)
    assert running.stdout is not None
    begun = running.stdout.read(1)
    assert pods["draft"].terminate() == 0
    assert pods["orchestrator"].terminate() == 0
    text = begun + running.stdout.read()
    assert running.wait(60) == 0
    assert text.rstrip("\n") == answer["text"].rstrip("\n")
    assert pods["verify"].probe("liveness")
    assert pods["verify"].terminate() == 0
