"""The pods of dev-cpu with TLS everywhere, as processes that see only what the manifests give them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import authority, issue
from tests.k8s.manifests import K8S, ROOT, Manifests, compose
from tests.k8s.pods import Pod, client, inside, network, possible, secret_mounts

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
        "orchestrator-tls": "DNS:orchestrator,DNS:orchestrator-pods",
        "gateway-tls": "gateway",
    }
    made = {secret: issue(ca, folder / secret, name) for secret, name in names.items()}
    tokens = folder / "orchestrator-tokens"
    tokens.mkdir()
    (tokens / "tokens").write_text(f"{TOKEN}\n")
    return made | {"orchestrator-tokens": tokens}


@pytest.fixture(scope="module")
def pods(folder: Path, manifests: Manifests, secrets: dict[str, Path]) -> Iterator[dict[str, Pod]]:
    """All of them, started in the order in which they need each other least: the target last."""
    with ExitStack() as stack:
        stack.enter_context(network())
        started: dict[str, Pod] = {}
        for service in ("gateway", "orchestrator", "draft", "verify"):
            mounts = secret_mounts(manifests, service, secrets) | {"/models": ROOT / "models/demo"}
            started[service] = Pod(manifests, service, mounts, folder)
            stack.callback(started[service].kill)
            if service == "orchestrator":
                started[service].until(lambda: started["orchestrator"].probe("startup"))
                assert not started[service].probe("readiness"), "there is no target yet"
                assert not started["gateway"].probe("readiness"), "the orchestrator does not serve yet"
                assert started["gateway"].probe("liveness")
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
    assert over_http(secrets, TOKEN)["choices"][0]["text"] == answer["text"]
    assert over_http(secrets, "another")["error"]["code"] == "invalid_api_key"
    running = client(folder, *REQUEST, *trust, token=TOKEN)
    assert running.stdout is not None
    begun = running.stdout.read(1)
    assert pods["draft"].terminate() == 0
    assert pods["gateway"].terminate() == 0
    assert pods["orchestrator"].terminate() == 0
    text = begun + running.stdout.read()
    assert running.wait(60) == 0
    assert text.rstrip("\n") == answer["text"].rstrip("\n")
    assert pods["verify"].probe("liveness")
    assert pods["verify"].terminate() == 0


def over_http(secrets: dict[str, Path], token: str) -> Any:
    """What the gateway answers to the same request, from a pod beside it."""
    prompt, *_ = REQUEST
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    program = (
        "import json, ssl, sys, urllib.request, urllib.error\n"
        "trust = ssl.create_default_context(cafile=sys.argv[1])\n"
        "headers = {'content-type': 'application/json', 'authorization': 'Bearer ' + sys.argv[2]}\n"
        "url = 'https://gateway:8000/v1/completions'\n"
        "asked = urllib.request.Request(url, sys.argv[3].encode(), headers)\n"
        "try: print(urllib.request.urlopen(asked, timeout=60, context=trust).read().decode())\n"
        "except urllib.error.HTTPError as error: print(error.read().decode())\n"
    )
    authority = str(secrets["gateway-tls"] / "ca.crt")
    command = [sys.executable, "-c", program, authority, token, json.dumps(body)]
    done = subprocess.run(inside("orchestrator", command), capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout or done.stderr)
