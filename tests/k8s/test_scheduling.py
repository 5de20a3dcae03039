"""Where pods go: on the smallest cluster for the overlay gpu nothing gets stuck, whatever the order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.k8s.manifests import OVERLAYS, SERVICES, of_kind, overlay, pod
from tests.k8s.scheduling import Cluster, Rules, State, ends, renewed, rules

NODES = 2
GPUS = 2
TARGETS = 2
ON_GPUS = ("verify", "draft")


def smallest(**changes: Rules) -> Cluster:
    """Two nodes of two GPUs, whose scheduler takes any node that is allowed: wishes promise nothing."""
    found = {name: replace(one, away={}) for name, one in rules(overlay("gpu"), ON_GPUS).items()}
    return Cluster(found | changes, GPUS)


def settled(cluster: Cluster, drafts: int) -> set[State]:
    """Every way to stand after an install and any number of drains and rolls of verify.

    Fails when one of them gets stuck, or leaves a pod without a GPU that it could have.
    """
    todo = ends(cluster.empty(NODES, verify=TARGETS, draft=drafts), cluster.schedule)
    seen = set(todo)
    while todo:
        state = todo.pop()
        spare = NODES * GPUS - TARGETS
        assert state.waiting("verify") == 0, f"a target is left without a GPU: {state}"
        assert state.waiting("draft") == max(0, drafts - spare), f"a GPU is left without a draft: {state}"
        after = {
            back
            for node in range(NODES)
            for done in drained(cluster, state, node)
            for back in ends(done, cluster.schedule)
        }
        after |= rolled(cluster, state, "verify")
        todo |= after - seen
        seen |= after
    return seen


def drained(cluster: Cluster, state: State, node: int) -> set[State]:
    """The ends of a drain of one node."""
    found = ends(state, cluster.drain(node))
    for end in found:
        assert not end.nodes[node], f"the drain of node {node} never ends: {state} -> {end}"
    return found


def rolled(cluster: Cluster, state: State, service: str) -> set[State]:
    """The ends of a service's roll, as the beginning of the next."""
    found = ends(state, cluster.roll(service))
    for end in found:
        pods = [one for node in (*end.nodes, end.pending) for one in node if one.service == service]
        assert all(one.new for one in pods), f"the roll never ends: {state} -> {end}"
        assert not end.waiting(service), f"the roll left a pod without a node: {state} -> {end}"
    return {renewed(end) for end in found}


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_drains_and_rolls_of_targets_end(drafts: int) -> None:
    """However pods stand, either node can be drained and targets rolled, also while an autoscaler asks for
    more drafts than there are GPUs; afterwards all targets run, and every GPU that they leave has a draft."""
    assert settled(smallest(), drafts)


@pytest.mark.parametrize("drafts", [1, 2])
def test_rolls_of_drafts_end(drafts: int) -> None:
    """Drafts that all have a GPU are rolled without a spare one."""
    cluster = smallest()
    for state in settled(cluster, drafts):
        rolled(cluster, state, "draft")


@pytest.mark.parametrize(
    ("drafts", "change"),
    [
        pytest.param(1, {"apart": frozenset({"verify"})}, id="drafts must keep off the targets' nodes"),
        pytest.param(2, {"priority": 0}, id="drafts count as much as targets"),
        pytest.param(3, {"max_unavailable": 1}, id="drafts have a budget"),
    ],
)
def test_the_model_finds_what_gets_stuck(drafts: int, change: dict[str, object]) -> None:
    """Each of the rules is needed: without it, some order of events never ends."""
    draft = replace(smallest().rules["draft"], **change)
    with pytest.raises(AssertionError, match=r"never ends|is left without"):
        settled(smallest(draft=draft), drafts)


@pytest.mark.parametrize("nodes", [2, 3])
def test_targets_keep_apart(nodes: int) -> None:
    """No node gets both targets, although a draft that came first keeps them off its own."""
    cluster = Cluster(rules(overlay("gpu"), ON_GPUS), GPUS)
    for state in ends(cluster.empty(nodes, verify=TARGETS, draft=1), cluster.schedule):
        assert all([one.service for one in node].count("verify") <= 1 for node in state.nodes), state


@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_keep_off_targets(drafts: int) -> None:
    """Drafts of running targets go to the node that has no target, as long as it has GPUs."""
    cluster = Cluster(rules(overlay("gpu"), ON_GPUS), GPUS)
    nodes = TARGETS + 1
    pending = cluster.empty(nodes, draft=drafts).pending
    for targets in ends(cluster.empty(nodes, verify=TARGETS), cluster.schedule):
        for state in ends(replace(targets, pending=pending), cluster.schedule):
            assert all(len({one.service for one in node}) <= 1 for node in state.nodes), state


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("service", SERVICES)
def test_a_roll_spreads_the_new_pods(name: str, service: str) -> None:
    """A Deployment's new pod is not kept off a node by old pods, which end after it has come; a StatefulSet's
    comes after the one that it replaces, and the others stay."""
    surges = service in of_kind(overlay(name), "Deployment")
    for spread in pod(overlay(name), service)["topologySpreadConstraints"]:
        assert spread.get("matchLabelKeys", []) == (["pod-template-hash"] if surges else [])
