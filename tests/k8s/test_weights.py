"""Ways to get the weights into a cluster: a Job that fetches them, and images that hold them."""

from __future__ import annotations

import ipaddress
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.serve import SERVICES as PROGRAMS
from outrider.config import EngineConfig
from tests.k8s.dockerfile import inherited, read
from tests.k8s.manifests import K8S, ROOT, Manifests, compose, container, environment, of_kind, pod
from tests.k8s.test_restricted import check_container, check_pod, edges

MODELS = {"verify": "target", "draft": "draft"}
"""The folder of each service's model."""


@pytest.fixture
def fetch(tmp_path: Path) -> Manifests:
    """The overlay gpu with the Job."""
    return compose(K8S / "overlays/gpu", ("weights-fetch",), tmp_path)


@pytest.fixture
def image(tmp_path: Path) -> Manifests:
    """The overlay gpu with weights in images."""
    return compose(K8S / "overlays/gpu", ("weights-image",), tmp_path)


def job(manifests: Manifests) -> Any:
    """The Job's pod."""
    return of_kind(manifests, "Job")["weights-fetch"]["spec"]["template"]["spec"]


@cache
def known_flags() -> set[str]:
    """What the hub's command takes."""
    command = [str(Path(sys.executable).parent / "hf"), "download", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return set(re.findall(r"--[a-z-]+", done.stdout))


def test_the_job_fetches_what_the_services_load(fetch: Manifests) -> None:
    """Each model goes into the folder that its service reads, on the claim that its pods mount; the command
    is in the image and has these flags."""
    folders = [re.search(r"/models/\w+", " ".join(one["args"])) for one in job(fetch)["containers"]]
    models = [environment(fetch, service)[f"OUTRIDER_{service.upper()}_MODEL"] for service in MODELS]
    assert [folder and folder[0] for folder in folders] == models
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in job(fetch)["volumes"]}
    assert claims["weights"] == {"claimName": "weights"}
    stages = read(ROOT / "docker/Dockerfile")
    (copy,) = (text for text in inherited(stages, "engine", "COPY") if "engine-build" in text)
    assert copy.endswith("/opt/outrider")
    assert "huggingface-hub==" in (ROOT / "requirements/orchestrator.txt").read_text()
    for one in job(fetch)["containers"]:
        assert one["command"] == ["hf"]
        assert {flag for flag in one["args"] if flag.startswith("--")} <= known_flags()


def test_every_name_of_the_job_is_a_setting_of_it(fetch: Manifests) -> None:
    """What the arguments and variables name is in its ConfigMap; it takes no pickles."""
    given = of_kind(fetch, "ConfigMap")["weights-fetch"]["data"]
    for one in job(fetch)["containers"]:
        assert set(re.findall(r"\$\((\w+)\)", " ".join(one["args"]))) <= given.keys()
        kept = {one["args"][i + 1] for i, word in enumerate(one["args"]) if word == "--include"}
        assert kept == {"*.safetensors", "*.json", "*.jinja"}


def test_the_job_can_be_applied_before_the_services(fetch: Manifests) -> None:
    """The selector of docs/kubernetes.md takes the Job with all that it needs, and no service."""
    found = [
        one for one in fetch if one["metadata"]["labels"].get("app.kubernetes.io/component") == "weights"
    ]
    kinds = {"ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim", "ServiceAccount"}
    assert {one["kind"] for one in found} == kinds
    assert len(found) == len(kinds)


def test_the_job_is_restricted_and_reaches_the_internet_alone(fetch: Manifests) -> None:
    """It may write the claim and nothing else, and talk HTTPS to public addresses; nobody may talk to it. It
    finds these addresses when the services, and so the policy of their DNS, are not there yet.
    """
    check_pod(job(fetch))
    for one in job(fetch)["containers"]:
        check_container(one, writable=("/tmp", "/models"))
    spec = of_kind(fetch, "NetworkPolicy")["weights-fetch"]["spec"]
    labels = of_kind(fetch, "Job")["weights-fetch"]["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    names, rule = spec["egress"]
    assert [names] == of_kind(fetch, "NetworkPolicy")["dns"]["spec"]["egress"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    excepted = [ipaddress.ip_network(one) for to in rule["to"] for one in to["ipBlock"]["except"]]
    for private in ("10.96.0.1", "192.168.1.1", "172.20.0.1", "169.254.169.254", "fd00::1"):
        assert any(ipaddress.ip_address(private) in network for network in excepted), private
    fetch.remove(of_kind(fetch, "NetworkPolicy")["weights-fetch"])
    assert not [edge for edge in edges(fetch, "egress") if 443 in edge], "no other pod has that way out"


@pytest.mark.parametrize("service", MODELS)
def test_images_hold_what_the_services_load(image: Manifests, service: str) -> None:
    """The model's folder is where its image is mounted, read-only; no pod wants the claim, which is gone."""
    config: Any = PROGRAMS[service].config
    assert issubclass(config, EngineConfig)
    folder = environment(image, service)[f"OUTRIDER_{service.upper()}_MODEL"]
    mounts = {mount["mountPath"]: mount for mount in container(image, service)["volumeMounts"]}
    assert mounts.keys() == {"/tmp", folder}
    assert mounts[folder]["readOnly"] is True
    volumes = {one["name"]: one for one in pod(image, service)["volumes"]}
    assert volumes["weights"] == {
        "name": "weights",
        "image": {"reference": f"outrider-weights-{MODELS[service]}:1", "pullPolicy": "IfNotPresent"},
    }
    assert not of_kind(image, "PersistentVolumeClaim")
    check_pod(pod(image, service))
