"""Targets that several pods share: each is a rank, with settings that the process takes; leaders serve."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli.main import _parser
from outrider.cli.serve import SERVICES as PROGRAMS
from outrider.cli.settings import resolve
from outrider.config import OrchestratorConfig, VerifyConfig
from outrider.engine.parallel.order import check_settings, split_address
from tests.k8s.manifests import (
    K8S,
    WORKLOADS,
    Manifest,
    Manifests,
    compose,
    of_kind,
    overlay,
    pod,
    render,
)
from tests.k8s.test_against_code import settings
from tests.k8s.test_rendered import VERSIONS, check, check_namespace
from tests.k8s.test_restricted import check_container, check_pod

COMPONENT = "leader-worker-set"
ROLES = ("leaderTemplate", "workerTemplate")
LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""The label that the operator gives the first pod of each group."""


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """The overlay for GPUs with the component."""
    return compose(K8S / "overlays/gpu", (COMPONENT,), tmp_path_factory.mktemp("group"))


def group(manifests: Manifests) -> Manifest:
    """The one LeaderWorkerSet."""
    (only,) = of_kind(manifests, "LeaderWorkerSet").values()
    return only


def template(manifests: Manifests, role: str) -> Manifest:
    """The pods of a role."""
    found: Manifest = group(manifests)["spec"]["leaderWorkerTemplate"][role]
    return found


def only_container(manifests: Manifests, role: str) -> Manifest:
    """The one container of a role's pods."""
    (only,) = template(manifests, role)["spec"]["containers"]
    found: Manifest = only
    return found


def rank(manifests: Manifests, index: int) -> VerifyConfig:
    """What the process of a group's pod resolves, with the variables that the operator sets first."""
    size = group(manifests)["spec"]["leaderWorkerTemplate"]["size"]
    one = only_container(manifests, ROLES[index > 0])
    known = {
        "LWS_LEADER_ADDRESS": "verify-ranks-0.verify-ranks.outrider",
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
    }
    (source,) = one["envFrom"]
    variables = dict(of_kind(manifests, "ConfigMap")[source["configMapRef"]["name"]]["data"])
    for variable in one["env"]:
        value = variable.get("value", "the-pod")
        variables[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], value)
    arguments = _parser().parse_args(one["args"])
    config: Any = resolve("verify", PROGRAMS["verify"].config, arguments, variables).config
    assert isinstance(config, VerifyConfig)
    return config


def test_each_pod_is_a_rank(manifests: Manifests) -> None:
    """With a GPU; all meet at the leader's address, at a port that nothing else listens on."""
    size = group(manifests)["spec"]["leaderWorkerTemplate"]["size"]
    ranks = [rank(manifests, index) for index in range(size)]
    assert size > 1
    for index, config in enumerate(ranks):
        check_settings(config)
        assert (config.tensor_parallel, config.tensor_parallel_rank) == (size, index)
        assert config.device == "cuda"
        limits = only_container(manifests, ROLES[index > 0])["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "1"
    assert len({config.tensor_parallel_address for config in ranks}) == 1
    host, port = split_address(ranks[0].tensor_parallel_address)
    assert host == "verify-ranks-0.verify-ranks.outrider"
    assert port not in (ranks[0].port, ranks[0].health_port, ranks[0].metrics_port)


def test_leaders_are_the_pods_that_they_replace(manifests: Manifests) -> None:
    """But for the settings of ranks; the StatefulSet is gone."""
    assert "verify" not in of_kind(manifests, *WORKLOADS)
    leader, before = template(manifests, "leaderTemplate")["spec"], pod(overlay("gpu"), "verify")
    (new,), (old,) = leader["containers"], before["containers"]
    own = [one for one in new["env"] if one["name"].startswith("OUTRIDER_VERIFY_TENSOR_PARALLEL")]
    assert len(own) == 3
    assert {**new, "env": [one for one in new["env"] if one not in own]} == old
    assert {**leader, "containers": 0} == {**before, "containers": 0, "shareProcessNamespace": True}


def test_workers_are_leaders_that_serve_nothing(manifests: Manifests) -> None:
    """No port, and no probe, which nothing would answer; Kubernetes gives them as long to end."""
    leader, worker = (template(manifests, role)["spec"] for role in ROLES)
    served = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    (new,), (old,) = worker["containers"], leader["containers"]
    assert new == {name: value for name, value in old.items() if name not in served}
    assert not {*new} & served
    assert worker["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"]
    assert template(manifests, ROLES[0])["metadata"] == template(manifests, ROLES[1])["metadata"]


def test_orchestrators_find_leaders_alone(manifests: Manifests) -> None:
    """The Service that they ask selects the first pod of each group, once it is ready. The operator's own one
    has another name, for it lists pods that are not."""
    config: OrchestratorConfig = settings(manifests, "orchestrator")
    (address,) = config.verify
    service = of_kind(manifests, "Service")[address.split(":")[1]]
    pods = template(manifests, "leaderTemplate")["metadata"]["labels"]
    assert LEADER.items() <= service["spec"]["selector"].items() <= (pods | LEADER).items()
    assert not service["spec"].get("publishNotReadyAddresses", False)
    assert group(manifests)["metadata"]["name"] not in of_kind(manifests, "Service")
    (port,) = service["spec"]["ports"]
    named = {one["name"]: one["containerPort"] for one in only_container(manifests, ROLES[0])["ports"]}
    assert named[port["targetPort"]] == port["port"] == rank(manifests, 0).port


def test_a_group_begins_and_ends_together(manifests: Manifests) -> None:
    """A leader is not ready before its workers have come, so they do not wait for that; a pod that is gone
    takes the others with it; a budget lets one pod go at a time, of whatever group."""
    spec = group(manifests)["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "replicas" not in spec, "an apply would undo kubectl scale"
    budget = of_kind(manifests, "PodDisruptionBudget")["verify"]["spec"]
    assert budget["maxUnavailable"] == 1
    for role in ROLES:
        labels = template(manifests, role)["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_ranks_talk_to_ranks_and_to_nobody_else(manifests: Manifests) -> None:
    """On any port, in both directions; what others may reach stays as it was."""
    policies, before = (of_kind(one, "NetworkPolicy") for one in (manifests, overlay("gpu")))
    assert {name: policies[name] for name in before} == before
    (new,) = policies.keys() - before.keys()
    spec = policies[new]["spec"]
    own = spec["podSelector"]
    assert spec == {
        "podSelector": own,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": own}]}],
        "egress": [{"to": [{"podSelector": own}]}],
    }
    for role in ROLES:
        assert own["matchLabels"].items() <= template(manifests, role)["metadata"]["labels"].items()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("version", VERSIONS)
def test_pods_are_valid_and_restricted(manifests: Manifests, role: str, version: str) -> None:
    """As if they were a Deployment's."""
    found = template(manifests, role)
    check(
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": found}, version
    )
    check_pod(found["spec"])
    check_container(only_container(manifests, role))


@pytest.mark.parametrize("role", ROLES)
def test_other_components_and_an_overlay_reach_the_pods(role: str, tmp_path: Path) -> None:
    """Those that are named before: certificates, weights as images, a writable root, settings; images, the
    namespace and the size of the overlay, as the example patches it."""
    names = ("mtls", "otel", "weights-image", "writable-root", COMPONENT)
    example = yaml.safe_load((K8S / "overlays/example/kustomization.yaml").read_text())
    patches = [patch for patch in example["patches"] if patch["target"]["kind"] == "LeaderWorkerSet"]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "team-b",
        "resources": [os.path.relpath(K8S / "overlays/gpu", tmp_path.resolve())],
        "components": [os.path.relpath(K8S / "components" / name, tmp_path.resolve()) for name in names],
        "images": [{"name": "outrider-engine", "newName": "registry.example.com/engine"}],
        "configMapGenerator": [
            {"name": "verify", "behavior": "merge", "literals": ["OUTRIDER_VERIFY_SERVED_NAME=my-model"]}
        ],
        "patches": patches,
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    manifests = render(tmp_path)
    check_namespace(manifests, "team-b")
    one = only_container(manifests, role)
    assert one["image"].startswith("registry.example.com/engine:")
    assert one["securityContext"]["readOnlyRootFilesystem"] is False
    assert {mount["mountPath"] for mount in one["volumeMounts"]} >= {"/tls", "/models/target"}
    config = rank(manifests, ROLES.index(role))
    assert (config.served_name, str(config.tls_cert)) == ("my-model", "/tls/tls.crt")
    assert config.tensor_parallel == 4
