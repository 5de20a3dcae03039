"""What a real API server says, when there is one: `KUBECONFIG=... pytest tests/k8s/test_server.py`.

Nothing is left behind but the namespace, without which a dry run of what goes into it is refused.
"""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml

from tests.k8s.manifests import OVERLAYS, Manifests, overlay

pytestmark = pytest.mark.skipif(
    "KUBECONFIG" not in os.environ, reason="set KUBECONFIG to a cluster that may be written to"
)


def kubectl(*arguments: str, manifests: Manifests = ()) -> subprocess.CompletedProcess[str]:
    """Run kubectl with manifests on its standard input."""
    text = yaml.safe_dump_all(manifests) if manifests else None
    return subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def groups() -> set[str]:
    """The API groups that the cluster serves; custom resources are there only with their operator."""
    done = kubectl("api-versions")
    assert done.returncode == 0, done.stderr
    return {line.partition("/")[0] for line in done.stdout.split()} | {"v1"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_accepts_every_object(name: str, groups: set[str]) -> None:
    """A server-side dry run refuses no object and no field, and warns of nothing."""
    known = [one for one in overlay(name) if one["apiVersion"].partition("/")[0] in groups]
    namespace = [one for one in known if one["kind"] == "Namespace"]
    assert kubectl("apply", "--server-side", "--filename=-", manifests=namespace).returncode == 0
    done = kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-", manifests=known
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert len(done.stdout.splitlines()) == len(known)
