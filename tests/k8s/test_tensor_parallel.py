"""Targets that several GPUs share: as many as there are ranks, with shared memory between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.config import VerifyConfig
from tests.k8s.manifests import K8S, Manifests, compose, container, pod
from tests.k8s.test_against_code import quantity, settings
from tests.k8s.test_restricted import check_container, check_pod


@pytest.fixture
def manifests(tmp_path: Path) -> Manifests:
    """The overlay for GPUs with the component."""
    return compose(K8S / "overlays/gpu", ("tensor-parallel",), tmp_path)


def test_each_rank_has_a_gpu(manifests: Manifests) -> None:
    """As many GPUs are asked for as the setting has ranks, and the cores of their threads."""
    config: VerifyConfig = settings(manifests, "verify")
    resources = container(manifests, "verify")["resources"]
    assert config.device == "cuda"
    assert config.tensor_parallel > 1
    assert resources["limits"]["nvidia.com/gpu"] == str(config.tensor_parallel)
    assert resources["requests"]["nvidia.com/gpu"] == str(config.tensor_parallel)
    assert quantity(resources["requests"]["cpu"]) >= config.threads * config.tensor_parallel
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_ranks_have_shared_memory(manifests: Manifests) -> None:
    """/dev/shm is in memory, has a limit below the pod's, and is all that may be written beside /tmp."""
    spec, one = pod(manifests, "verify"), container(manifests, "verify")
    (mount,) = [mount for mount in one["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert quantity(volume["emptyDir"]["sizeLimit"]) < quantity(one["resources"]["limits"]["memory"])
    check_pod(spec)
    check_container(one, writable=("/tmp", "/dev/shm"))
