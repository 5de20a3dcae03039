"""No pod may do or reach more than it needs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.k8s.manifests import (
    COLLECTOR,
    OVERLAYS,
    SERVICES,
    WORKLOADS,
    Manifest,
    Manifests,
    environment,
    of_kind,
    overlay,
)

Edge = tuple[str, str, int]
"""From, to, port. Ends are services, or the labels of a namespace."""
PROMETHEUS = "kubernetes.io/metadata.name=monitoring"
KEDA = "kubernetes.io/metadata.name=keda"
CLIENT = "outrider-client=true"
DNS = "kubernetes.io/metadata.name=kube-system,k8s-app=kube-dns"


def edges(manifests: Manifests, direction: str) -> set[Edge]:
    """What the policies allow: "ingress" as its receiver sees it, or "egress" as its sender does."""
    found: set[Edge] = set()
    for policy in of_kind(manifests, "NetworkPolicy").values():
        spec = policy["spec"]
        own = _names(manifests, {"podSelector": spec["podSelector"]})
        for rule in spec.get(direction, ()):
            if any("ipBlock" in peer for peer in rule["from" if direction == "ingress" else "to"]):
                continue  # addresses outside
            others = [
                name
                for peer in rule["from" if direction == "ingress" else "to"]
                for name in _names(manifests, peer)
            ]
            for port in rule["ports"]:
                pairs = {
                    (other, one) if direction == "ingress" else (one, other)
                    for other in others
                    for one in own
                }
                found |= {(sender, receiver, port["port"]) for sender, receiver in pairs}
    return found


def _names(manifests: Manifests, peer: Manifest) -> list[str]:
    """The services that a peer selects, or its labels when it is somebody else."""
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if "namespaceSelector" in peer:
        namespace = peer["namespaceSelector"]["matchLabels"]
        return [",".join(f"{key}={value}" for key, value in {**namespace, **labels}.items())]
    ours = [
        name
        for name, one in of_kind(manifests, *WORKLOADS).items()
        if labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    ]
    return ours or [",".join(f"{key}={value}" for key, value in labels.items())]


def ports(manifests: Manifests, service: str) -> dict[str, int]:
    """The ports that a service's settings name."""
    variables = environment(manifests, service)
    prefix = f"OUTRIDER_{service.upper()}_"
    return {name: int(variables[f"{prefix}{name.upper()}"]) for name in ("port", "metrics_port")}


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_the_needed_edges_are_open(name: str) -> None:
    """What may talk to whom is what the settings make talk, from both ends, and nothing else."""
    manifests = overlay(name)
    own = {service: ports(manifests, service) for service in SERVICES}
    inner = {("orchestrator", kind, own[kind]["port"]) for kind in ("verify", "draft")}
    inner.add(("gateway", "orchestrator", own["orchestrator"]["port"]))
    ingress = inner | {(CLIENT, service, own[service]["port"]) for service in ("gateway", "orchestrator")}
    ingress |= {(PROMETHEUS, service, own[service]["metrics_port"]) for service in SERVICES}
    egress = set(inner)
    everybody = set(of_kind(manifests, *WORKLOADS))
    if name == "everything":
        traces = {(service, COLLECTOR, 4317) for service in SERVICES}
        ingress |= traces | {(KEDA, "orchestrator", own["orchestrator"]["port"])}
        egress |= traces | {(COLLECTOR, PROMETHEUS, 4317)}
    assert edges(manifests, "ingress") == ingress
    assert edges(manifests, "egress") == egress | {(one, DNS, 53) for one in everybody}


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_else_is_denied(name: str) -> None:
    """One policy selects every pod for both directions and allows nothing."""
    spec = of_kind(overlay(name), "NetworkPolicy")["default-deny"]["spec"]
    assert spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_restricted(name: str) -> None:
    """Every pod meets the restricted Pod Security Standard, and more: nothing on its root can be written,
    and it has no account of the cluster."""
    manifests = overlay(name)
    labels = of_kind(manifests, "Namespace")["outrider"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in of_kind(manifests, *WORKLOADS).values():
        spec = workload["spec"]["template"]["spec"]
        check_pod(spec)
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            check_container(container)
    for account in of_kind(manifests, "ServiceAccount").values():
        assert account["automountServiceAccountToken"] is False


def check_pod(spec: dict[str, Any]) -> None:
    """Raises when a pod may do more than it should."""
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for volume in spec["volumes"]:
        kinds = volume.keys() - {"name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "image"}


def check_container(container: dict[str, Any], writable: tuple[str, ...] = ("/tmp",)) -> None:
    """Raises when a container may do more than it should, or write elsewhere."""
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context.get("privileged", False) is False
    assert container["resources"]["limits"]["memory"]
    assert not any("hostPort" in port for port in container.get("ports", ()))
    for mount in container["volumeMounts"]:
        assert mount["mountPath"] in writable or mount["readOnly"] is True


def test_the_collectors_configuration_holds_together() -> None:
    """Pipelines use components that are defined; the receiver and the health check listen where the pod
    says; a variable that the file names is given."""
    manifests = overlay("everything")
    maps = of_kind(manifests, "ConfigMap")
    (text,) = (one["data"]["config.yaml"] for one in maps.values() if "config.yaml" in one["data"])
    config = yaml.safe_load(text)
    for pipeline in config["service"]["pipelines"].values():
        for section, names in pipeline.items():
            assert set(names) <= config[section].keys()
    assert set(config["service"]["extensions"]) <= config["extensions"].keys()
    (container,) = of_kind(manifests, *WORKLOADS)[COLLECTOR]["spec"]["template"]["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    listening = (config["receivers"]["otlp"]["protocols"]["grpc"], config["extensions"]["health_check"])
    assert {int(one["endpoint"].rpartition(":")[2]) for one in listening} == ports
    assert config["exporters"]["otlp_grpc"]["endpoint"] == "${env:TRACES_ENDPOINT}"
    assert "TRACES_ENDPOINT" in environment(manifests, COLLECTOR)
