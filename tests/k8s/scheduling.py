"""Scheduler, evictions and rolls in small, over the rendered manifests: enough to see whether one gets stuck.

A state is where pods are. Whatever may happen next is tried in every order; a state in which nothing can
happen any more is an end. A pod that has a node is ready at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.k8s.manifests import Manifest, Manifests, container, of_kind, pod, workload

GPU = "nvidia.com/gpu"


class Pod(NamedTuple):
    """Of a service, and whether it is of the new revision; equal pods are interchangeable."""

    service: str
    new: bool = False


Node = tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Pods by node, and those that have none."""

    nodes: tuple[Node, ...]
    pending: Node

    def waiting(self, service: str) -> int:
        """How many of the service's pods have no node."""
        return sum(one.service == service for one in self.pending)

    def removed(self, node: int, gone: Pod, successor: Pod) -> State:
        """A pod ends, and its controller makes another."""
        nodes = _changed(self.nodes, node, _without(self.nodes[node], gone))
        return State(nodes, _with(self.pending, successor))

    def placed(self, node: int, one: Pod) -> State:
        """A pending pod gets a node."""
        return State(_changed(self.nodes, node, _with(self.nodes[node], one)), _without(self.pending, one))


@dataclass(frozen=True, slots=True)
class Rules:
    """What the manifests say of one service's pods."""

    gpus: int
    priority: int
    max_unavailable: int | None
    """None: any number may be evicted."""
    apart: frozenset[str]
    """Services whose nodes are forbidden."""
    away: dict[str, int]
    """Services whose nodes are avoided, with the weight."""


Moves = Callable[[State], Iterable[State]]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with the same number of GPUs."""

    rules: dict[str, Rules]
    gpus: int

    def empty(self, nodes: int, **pods: int) -> State:
        """Nothing has a node yet."""
        pending = (Pod(service) for service, count in pods.items() for _ in range(count))
        return State(((),) * nodes, _with((), *pending))

    def schedule(self, state: State, closed: int | None = None) -> Iterator[State]:
        """Any pending pod goes to the best node that takes it, or drives out a pod that counts less."""
        nodes = [node for node in range(len(state.nodes)) if node != closed]
        for one in set(state.pending):
            scores = {
                node: self._score(one, state.nodes[node])
                for node in nodes
                if self._fits(one, state.nodes[node])
            }
            yield from (
                state.placed(node, one) for node, score in scores.items() if score == max(scores.values())
            )
            if not scores:
                yield from self._preempt(state, one, nodes)

    def drain(self, node: int) -> Moves:
        """`kubectl drain`: the node takes no pod, and its own are evicted as their budgets allow."""

        def moves(state: State) -> Iterator[State]:
            yield from self.schedule(state, closed=node)
            for one in set(state.nodes[node]):
                allowed = self.rules[one.service].max_unavailable
                if allowed is None or state.waiting(one.service) < allowed:
                    yield state.removed(node, one, one)

        return moves

    def roll(self, service: str) -> Moves:
        """One pod at a time ends and comes back as a new one, when no other of the service is missing."""

        def moves(state: State) -> Iterator[State]:
            yield from self.schedule(state)
            old = Pod(service)
            if not state.waiting(service):
                yield from (
                    state.removed(node, old, Pod(service, new=True))
                    for node, pods in enumerate(state.nodes)
                    if old in pods
                )

        return moves

    def _fits(self, one: Pod, node: Node) -> bool:
        mine = self.rules[one.service]
        refused = any(
            other.service in mine.apart or one.service in self.rules[other.service].apart for other in node
        )
        return not refused and sum(self.rules[each.service].gpus for each in (*node, one)) <= self.gpus

    def _score(self, one: Pod, node: Node) -> int:
        """As the scheduler's InterPodAffinity: wishes of the pod, and of those that are there."""
        mine = self.rules[one.service].away
        return -sum(
            mine.get(other.service, 0) + self.rules[other.service].away.get(one.service, 0) for other in node
        )

    def _preempt(self, state: State, one: Pod, nodes: list[int]) -> Iterator[State]:
        for node in nodes:
            for victim in set(state.nodes[node]):
                less = self.rules[victim.service].priority < self.rules[one.service].priority
                if less and self._fits(one, _without(state.nodes[node], victim)):
                    yield state.removed(node, victim, victim).placed(node, one)


def ends(start: State, moves: Moves) -> set[State]:
    """Every state in which nothing more can happen, by whatever order."""
    seen, todo, found = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = set(moves(state))
        if not following:
            found.add(state)
        todo += following - seen
        seen |= following
    return found


def rules(manifests: Manifests, services: tuple[str, ...]) -> dict[str, Rules]:
    """What the manifests say of these services."""
    return {service: _rules(manifests, service, services) for service in services}


def renewed(state: State) -> State:
    """After a roll: the new revision is the one that the next roll replaces."""
    old = [tuple(Pod(one.service) for one in pods) for pods in (*state.nodes, state.pending)]
    return State(tuple(old[:-1]), old[-1])


def _rules(manifests: Manifests, service: str, services: tuple[str, ...]) -> Rules:
    spec = pod(manifests, service)
    classes = of_kind(manifests, "PriorityClass")
    budget = of_kind(manifests, "PodDisruptionBudget").get(service)
    terms = spec.get("affinity", {}).get("podAntiAffinity", {})
    return Rules(
        gpus=int(container(manifests, service)["resources"]["limits"][GPU]),
        priority=classes[spec["priorityClassName"]]["value"] if "priorityClassName" in spec else 0,
        max_unavailable=budget["spec"]["maxUnavailable"] if budget else None,
        apart=frozenset(
            name
            for term in terms.get("requiredDuringSchedulingIgnoredDuringExecution", ())
            for name in _selected(manifests, term, services)
        ),
        away={
            name: wish["weight"]
            for wish in terms.get("preferredDuringSchedulingIgnoredDuringExecution", ())
            for name in _selected(manifests, wish["podAffinityTerm"], services)
        },
    )


def _selected(manifests: Manifests, term: Manifest, services: tuple[str, ...]) -> list[str]:
    """The services whose pods a term selects, by node."""
    assert term["topologyKey"] == "kubernetes.io/hostname"
    wanted = term["labelSelector"]["matchLabels"].items()
    return [
        name
        for name in services
        if wanted <= workload(manifests, name)["spec"]["template"]["metadata"]["labels"].items()
    ]


def _changed(nodes: tuple[Node, ...], index: int, node: Node) -> tuple[Node, ...]:
    return (*nodes[:index], node, *nodes[index + 1 :])


def _with(pods: Node, *more: Pod) -> Node:
    return tuple(sorted((*pods, *more)))


def _without(pods: Node, one: Pod) -> Node:
    index = pods.index(one)
    return (*pods[:index], *pods[index + 1 :])
