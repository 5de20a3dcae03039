"""Every overlay, and every component on every overlay, is accepted by the schemas of several versions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.manifests import (
    CLUSTER_WIDE,
    COMPONENTS,
    K8S,
    NAMESPACE,
    OVERLAYS,
    SERVICES,
    TOGETHER,
    Manifest,
    Manifests,
    compose,
    container,
    of_kind,
    overlay,
    workload,
)
from tests.k8s.manifests import (
    environment as settings_of,
)

VERSIONS = ("1.30", "1.33", "1.36", "1.37")
"""1.30 is the oldest with preStop.sleep on by default."""
CUSTOM = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())


def check(manifest: Manifest, version: str) -> None:
    """Raises when the manifest has an unknown or missing field, or a value of another type."""
    _check(json.dumps(manifest, sort_keys=True), version)


@cache
def _check(text: str, version: str) -> None:
    """Once for every manifest: most are the same in every combination."""
    manifest = json.loads(text)
    if manifest["kind"] in CUSTOM:
        jsonschema.validate(manifest, CUSTOM[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["dev-cpu", "everything"])  # which has all of gpu
def test_overlays_are_valid(name: str, version: str) -> None:
    """Each overlay holds nothing that a cluster of this version would refuse or ignore."""
    for manifest in overlay(name):
        check(manifest, version)


@pytest.mark.parametrize("component", COMPONENTS)
def test_components_stand_alone(component: str, tmp_path: Path) -> None:
    """A component, with what it says it needs, is valid on the base and stays in its namespace."""
    manifests = compose(K8S / "base", (component,), tmp_path)
    check_namespace(manifests, NAMESPACE)
    for manifest in manifests:
        check(manifest, VERSIONS[-1])


@pytest.mark.parametrize("name", ["dev-cpu", "gpu"])
def test_components_go_together(name: str, tmp_path: Path) -> None:
    """All components that go together are valid on each overlay and share no name."""
    manifests = compose(K8S / "overlays" / name, TOGETHER, tmp_path)
    for manifest in manifests:
        check(manifest, VERSIONS[-1])
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)


def test_everything_is_everything() -> None:
    """The overlay that shows how components are put together leaves none out that goes with the others."""
    content = yaml.safe_load((K8S / "overlays/everything/kustomization.yaml").read_text())
    assert {Path(path).name for path in content["components"]} == set(TOGETHER)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Deployment", {"spec": {"replica": 2}}),
        ("ScaledObject", {"spec": {"triggers": []}}),
        ("Certificate", {"spec": {"dnsName": "draft"}}),
    ],
)
def test_mistakes_are_found(kind: str, change: Manifest) -> None:
    """The schemas refuse a misspelt field and a missing one, of ours and of custom resources."""
    broken = next(one for one in overlay("everything") if one["kind"] == kind)
    broken = {**broken, "spec": {**broken["spec"], **change["spec"]}}
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(broken, VERSIONS[-1])


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_is_left_outside_of_the_namespace(name: str) -> None:
    """Every object is in the namespace outrider and says whose part it is."""
    check_namespace(overlay(name), NAMESPACE)
    for manifest in overlay(name):
        metadata = manifest["metadata"]
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "outrider", metadata


@pytest.mark.parametrize("components", [TOGETHER, ("hpa", "weights-fetch", "writable-root")])
def test_components_follow_the_namespace(components: tuple[str, ...], tmp_path: Path) -> None:
    """In an overlay with a namespace of its own every object is in it, and no name leads out of it; it is the
    same when an overlay below has named the namespace."""
    for folder in ("one", "below", "above"):
        (tmp_path / folder).mkdir()
    manifests = compose(K8S / "overlays/gpu", components, tmp_path / "one", "team-b")
    check_namespace(manifests, "team-b")
    assert "outrider.svc" not in yaml.safe_dump_all(manifests)
    compose(K8S / "overlays/gpu", (), tmp_path / "below", "team-b")
    assert compose(tmp_path / "below", components, tmp_path / "above") == manifests


def check_namespace(manifests: Manifests, namespace: str) -> None:
    """Raises when an object is elsewhere."""
    for manifest in manifests:
        expected = None if manifest["kind"] in CLUSTER_WIDE else namespace
        assert manifest["metadata"].get("namespace") == expected, manifest["metadata"]
    assert list(of_kind(manifests, "Namespace")) == [namespace]


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("service", SERVICES)
def test_an_apply_leaves_the_number_of_pods_alone(name: str, service: str) -> None:
    """No service's manifest says how many pods there are: that would undo `kubectl scale` and autoscalers."""
    assert "replicas" not in workload(overlay(name), service)["spec"]


def test_autoscalers_aim_at_the_draft_pool(tmp_path: Path) -> None:
    """Both aim at the drafts' Deployment, within the same bounds and by the same behavior."""
    (tmp_path / "hpa").mkdir()
    with_hpa = compose(K8S / "base", ("hpa",), tmp_path / "hpa")
    hpa = of_kind(with_hpa, "HorizontalPodAutoscaler")["draft"]["spec"]
    scaled = of_kind(overlay("everything"), "ScaledObject")["draft"]["spec"]
    assert hpa["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "draft"}
    assert scaled["scaleTargetRef"] == {"name": "draft"}
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (scaled["minReplicaCount"], scaled["maxReplicaCount"])
    assert hpa["behavior"] == scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert hpa["minReplicas"] < hpa["maxReplicas"]


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("service", SERVICES)
def test_selectors_find_their_pods(name: str, service: str) -> None:
    """Service, disruption budget and topology spread select the pods of their own workload; drafts have no
    budget."""
    manifests = overlay(name)
    template = workload(manifests, service)["spec"]["template"]
    budgets = of_kind(manifests, "PodDisruptionBudget")
    spreads = template["spec"]["topologySpreadConstraints"]
    selectors = [
        workload(manifests, service)["spec"]["selector"]["matchLabels"],
        of_kind(manifests, "Service")[service]["spec"]["selector"],
        *(budget["spec"]["selector"]["matchLabels"] for name, budget in budgets.items() if name == service),
        *(spread["labelSelector"]["matchLabels"] for spread in spreads),
    ]
    assert len(spreads) == 2
    assert budgets.keys() == {"gateway", "orchestrator", "verify"}
    for selector in selectors:
        assert selector.items() <= template["metadata"]["labels"].items()
        assert selector["app.kubernetes.io/component"] == service


def test_a_changed_setting_rolls_the_pods(tmp_path: Path) -> None:
    """Pods name the ConfigMap by its content, so that an edit makes a new template."""

    def source(manifests: Manifests) -> str:
        template = workload(manifests, "draft")["spec"]["template"]["spec"]
        return str(template["containers"][0]["envFrom"][0]["configMapRef"]["name"])

    assert source(overlay("gpu")) != source(overlay("dev-cpu"))
    assert source(compose(K8S / "overlays/gpu", (), tmp_path)) == source(overlay("gpu"))


def test_the_example_is_valid() -> None:
    """The overlay that people copy, with all of its patches; so is the pod that fills the claim."""
    manifests = overlay("example")
    assert of_kind(manifests, "HTTPRoute")["outrider"]["spec"]["hostnames"] == ["llm.example.com"]
    assert of_kind(manifests, "ConfigMap")["weights-fetch"]["data"]["TARGET"] == "your/target"
    assert settings_of(manifests, "verify")["OUTRIDER_VERIFY_SERVED_NAME"] == "my-model"
    for manifest in (*manifests, yaml.safe_load((K8S / "fill.yaml").read_text())):
        check(manifest, VERSIONS[-1])
    check_namespace(manifests, NAMESPACE)
    assert "nvidia.com/mig-1g.10gb" in container(manifests, "draft")["resources"]["limits"]
