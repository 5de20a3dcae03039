"""Manifests write out what a server would fill in, so that every apply sends what is there already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import K8S, OVERLAYS, TOGETHER, Manifests, compose, overlay

DEFAULTS = {
    "fieldRef": ("apiVersion",),
    "ports": ("protocol",),
    "relabelings": ("action",),
    "strategy": ("type",),
    "updateStrategy": ("type",),
}
"""Fields with a default, by what they are in. Lists and some maps are applied as a whole: one that lacks a
default differs from the server's, and belongs to whoever applied it first."""
QUANTITIES = ("requests", "limits", "capacity")


def found(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every map and scalar with the names that lead to it."""
    if isinstance(value, list):
        for one in value:
            yield from found(one, path)
        return
    yield path, value
    if isinstance(value, dict):
        for name, one in value.items():
            yield from found(one, (*path, name))


def unsaid(manifests: Manifests) -> list[str]:
    """Where a default is left out, or a quantity is a number."""
    complaints = []
    for manifest in manifests:
        for path, value in found(manifest.get("spec", {})):
            lacking = [name for name in DEFAULTS.get(path[-1], ()) if name not in value] if path else []
            number = len(path) > 1 and path[-2] in QUANTITIES and not isinstance(value, str)
            if lacking or number:
                where = ".".join((manifest["kind"], manifest["metadata"]["name"], *path))
                complaints.append(f"{where}: {lacking or value}")
    return complaints


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_say_defaults(name: str) -> None:
    """No default is left to the server in what is applied as a whole, and quantities are strings."""
    assert unsaid(overlay(name)) == []


def test_components_say_defaults(tmp_path: Path) -> None:
    """The same for what components bring, with the autoscaler that everything leaves out."""
    assert unsaid(compose(K8S / "base", ("hpa", *TOGETHER), tmp_path)) == []


def test_what_is_left_out_is_found() -> None:
    """Each kind of omission is reported with its place."""
    spec = {
        "strategy": {"rollingUpdate": {"maxSurge": 1}},
        "env": [{"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"port": 53}, {"port": 53, "protocol": "UDP"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi"}},
    }
    assert unsaid([{"kind": "Any", "metadata": {"name": "one"}, "spec": spec}]) == [
        "Any.one.strategy: ['type']",
        "Any.one.env.valueFrom.fieldRef: ['apiVersion']",
        "Any.one.ports: ['protocol']",
        "Any.one.resources.limits.nvidia.com/gpu: 1",
    ]
