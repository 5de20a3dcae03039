"""Renders the manifests and finds things in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("dev-cpu", "gpu", "everything")
COMPONENTS = tuple(sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml")))
NEEDS = {"keda-tls": ("edge", "keda"), "cert-manager": ("mtls",)}
"""Components that change what another one brings."""
TOGETHER = tuple(
    name
    for name in COMPONENTS
    if name
    not in ("hpa", "leader-worker-set", "tensor-parallel", "weights-fetch", "weights-image", "writable-root")
)
"""All but the second autoscaler, other ways to get weights, and what only some nodes or targets need."""
GRPC_SERVICES = ("orchestrator", "verify", "draft")
SERVICES = ("gateway", *GRPC_SERVICES)
WORKLOADS = ("Deployment", "StatefulSet")
COLLECTOR = "otel-collector"
NAMESPACE = "outrider"
CLUSTER_WIDE = ("Namespace", "PriorityClass")
"""Kinds that are in no namespace."""

Manifest = dict[str, Any]
Manifests = list[Manifest]


def render(kustomization: Path) -> Manifests:
    """What kustomize makes of a folder; skips the test where there is no kustomize, except in CI."""
    command = _command()
    if command is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs kubectl or kustomize")
        pytest.skip("install kubectl or kustomize to render the manifests")
    done = subprocess.run([*command, str(kustomization)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


@cache
def overlay(name: str) -> Manifests:
    """A rendered overlay."""
    return render(K8S / "overlays" / name)


def compose(base: Path, components: tuple[str, ...], folder: Path, namespace: str | None = None) -> Manifests:
    """A base or overlay with components, as somebody's own overlay would put them together.

    `namespace` is what that overlay names, if it names any.
    """
    needed = tuple(dict.fromkeys(need for name in components for need in (*NEEDS.get(name, ()), name)))
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                **({"namespace": namespace} if namespace else {}),
                "resources": [_relative(base, folder)],
                "components": [_relative(K8S / "components" / name, folder) for name in needed],
            }
        )
    )
    return render(folder)


def of_kind(manifests: Manifests, *kinds: str) -> dict[str, Manifest]:
    """Manifests of some kinds by name."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in kinds}


def workload(manifests: Manifests, service: str) -> Manifest:
    """The Deployment or StatefulSet of a service."""
    return of_kind(manifests, *WORKLOADS)[service]


def pod(manifests: Manifests, service: str) -> Manifest:
    """The pod's spec of a service."""
    return workload(manifests, service)["spec"]["template"]["spec"]


def container(manifests: Manifests, service: str) -> Manifest:
    """The one container of a service."""
    (only,) = pod(manifests, service)["containers"]
    return only


def environment(manifests: Manifests, service: str) -> dict[str, str]:
    """What the container's environment will be; a field of the pod is shown as the pod's name."""
    one = container(manifests, service)
    maps = of_kind(manifests, "ConfigMap")
    variables: dict[str, str] = {}
    for source in one.get("envFrom", ()):
        variables |= maps[source["configMapRef"]["name"]]["data"]
    for variable in one.get("env", ()):
        variables[variable["name"]] = variable.get("value", f"{service}-0")
    return variables


def _command() -> list[str] | None:
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def _relative(path: Path, folder: Path) -> str:
    """Kustomize takes folders relative to the kustomization that names them."""
    return os.path.relpath(path.resolve(), folder.resolve())
