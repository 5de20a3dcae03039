"""The processes under test, a proxy before each, and how faults are carried out on them.

    clients --> proxy --> orchestrator-a, orchestrator-b --> proxy --> verify-a, verify-b, draft-a, draft-b
                                                                        (and a liar)

All methods belong to one event loop, which runs the proxies too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc
from scripts.proxy import Proxy
from tests.faults.harness import watched
from tests.faults.harness.plan import DRAFTS, LIAR, ORCHESTRATORS, PROCESSES, VERIFIES, Fault, Kind
from tests.integration import fake_drafts
from tests.integration.client import verify_info
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process
from tests.integration.hostile_draft import HostileDraft

RETURN_SECONDS = 120.0
"""Within which a replica is back: so long a request waits for one. A busy machine takes half of it."""
SETTLE_SECONDS = 60.0
"""Longest time until the orchestrator uses a replica that is ready again."""
EXIT_SECONDS = 90.0
"""Longest drain; above the grace period."""

PRESTOP_SECONDS = 2.0
"""For callers who have just connected to an orchestrator that leaves; in Kubernetes five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Room in the system, narrow on purpose."""

    kv_tokens: int = 1024
    max_running: int = 8
    max_queued: int = 4
    max_sessions: int = 16


@dataclass(slots=True)
class Disturbance:
    """A time in which a caller may be cut off: the orchestrator, or the way to it, was broken."""

    began: float
    ended: float = float("inf")


@dataclass(slots=True)
class System:
    """Two verify replicas, two drafts, and two orchestrators that share them."""

    folder: Path
    sizes: Sizes = field(default_factory=Sizes)
    processes: dict[str, Process] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    paused: set[str] = field(default_factory=set)
    """Stopped or restarting: not to be asked anything."""
    _listed: list[str] = field(default_factory=list)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _cluster: Cluster | None = None
    _liar: grpc.Server | None = None
    _turns: Iterator[str] = field(default_factory=lambda: cycle(ORCHESTRATORS))

    @property
    def endpoint(self) -> str:
        """Where the next call goes: to each orchestrator in turn, as from behind a balancer."""
        return self.proxies[next(self._turns)].endpoint

    async def start(self) -> None:
        """Start everything and wait until both orchestrators use all four replicas."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {"FAULTS_WINDOW": self._window, "OMP_NUM_THREADS": "1"}
        self._cluster = Cluster(self.folder, environment, watched.__name__)
        room = {"max_sessions": self.sizes.max_sessions, "kv_tokens": self.sizes.kv_tokens}
        shared = {"dtype": "float32", "device": "cpu", "grace_seconds": 3, **room}
        target = {"model": DEMO_TARGET, "lease_seconds": 2, **shared}
        for name in VERIFIES:
            self.processes[name] = self._cluster.serve("verify", name=name, **target)
        for name in DRAFTS:
            self.processes[name] = self._cluster.serve("draft", name=name, model=DEMO_DRAFT, **shared)
        for name in (*VERIFIES, *DRAFTS):
            await asyncio.to_thread(self.processes[name].wait_ready)
            await self._put_proxy(name, self.processes[name].endpoint)
        await self._start_liar()
        self._list(*VERIFIES, *DRAFTS)
        for name in ORCHESTRATORS:
            self.processes[name] = await asyncio.to_thread(self._start_orchestrator, name)
            await self._put_proxy(name, self.processes[name].endpoint)
        await self.whole()

    async def stop(self) -> None:
        """End everything."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
        if self._cluster is not None:
            self._cluster.stop()
        for proxy in self.proxies.values():
            await proxy.close()
        if self._liar is not None:
            self._liar.stop(0)

    async def whole(self) -> None:
        """Wait until both orchestrators can use every replica.

        Raises:
            AssertionError: it does not in time.
        """
        await self.until_usable(verify=len(VERIFIES), draft=len(DRAFTS))

    async def until_usable(self, **counts: int) -> None:
        """Wait until both orchestrators can use so many replicas of a kind.

        Raises:
            AssertionError: it does not in time.
        """
        end = time.monotonic() + SETTLE_SECONDS
        for name in ORCHESTRATORS:
            while (usable := await self._usable(name)) != {**usable, **counts}:
                assert time.monotonic() < end, f"{name} after {SETTLE_SECONDS:g} s: {usable}, wanted {counts}"
                await asyncio.sleep(0.05)

    def disturbed(self, began: float, ended: float) -> bool:
        """Whether callers may have been cut off between two moments."""
        return any(one.began <= ended and one.ended >= began for one in self.disturbances)

    async def apply(self, fault: Fault) -> None:
        """Carry out a fault and mend it again; returns when the process works as before."""
        async with self._locks.setdefault(fault.target, asyncio.Lock()):
            edge = fault.target in ORCHESTRATORS and fault.kind not in (Kind.DELAY, Kind.CLOCK)
            disturbance = Disturbance(time.monotonic())
            if edge:
                self.disturbances.append(disturbance)
            try:
                await self._break_and_mend(fault)
            finally:
                disturbance.ended = time.monotonic()

    async def _break_and_mend(self, fault: Fault) -> None:
        if fault.kind is Kind.BURST:
            return  # the load's part
        name, proxy = fault.target, self.proxies[fault.target]
        match fault.kind:
            case Kind.KILL | Kind.TERMINATE:
                number = signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGTERM
                await self.restart(name, number)
            case Kind.STOP:
                self.paused.add(name)
                self.processes[name].signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                self.processes[name].signal(signal.SIGCONT)
                self.paused.discard(name)
            case Kind.CUT:
                proxy.cut()
            case Kind.FREEZE:
                proxy.freeze()
                await asyncio.sleep(fault.seconds)
                proxy.thaw()
            case Kind.DELAY:
                proxy.round_trip = fault.seconds / 50  # up to 80 ms
                await asyncio.sleep(fault.seconds)
                proxy.round_trip = 0.0
            case Kind.LEAVE:
                self._list(*(listed for listed in self._listed if listed != name))
                await asyncio.sleep(fault.seconds)
                self._list(*self._listed, name)
            case Kind.LIE:
                self._list(*self._listed, LIAR)
                await asyncio.sleep(fault.seconds)
                self._list(*(listed for listed in self._listed if listed != LIAR))
            case Kind.CLOCK:
                await self.ask(name, f"clock {fault.seconds}")

    async def restart(self, name: str, number: signal.Signals) -> float:
        """End a process with a signal and start it again on its port; seconds from its end to readiness."""
        process = self.processes[name]
        self.paused.add(name)
        process.signal(number)
        status = await asyncio.to_thread(process.wait, EXIT_SECONDS)
        assert number == signal.SIGKILL or status == 0, f"{name} ended with {status}:\n{process.tail()}"
        return await self.start_again(name)

    async def start_again(self, name: str) -> float:
        """Start a process that has ended, on the port that it had; seconds until it is ready."""
        assert self._cluster is not None
        process, began = self.processes[name], time.monotonic()
        await asyncio.to_thread(process.wait, EXIT_SECONDS)
        self.processes[name] = await asyncio.to_thread(self._cluster.restart, process)
        self.paused.discard(name)
        return time.monotonic() - began

    async def roll(self, kind: str) -> None:
        """Replace every process of a kind by the order that docs/kubernetes.md gives."""
        if kind == "orchestrator":
            for name in ORCHESTRATORS:
                await self._replace_orchestrator(name)
            return
        for name in {"verify": VERIFIES, "draft": DRAFTS}[kind]:
            await self.restart(name, signal.SIGTERM)
            await self.whole()

    async def _replace_orchestrator(self, name: str) -> None:
        """Start a new one, send new connections to it, wait as `preStop` does, and drain the old one."""
        old = self.processes[name]
        self.processes[name] = new = await asyncio.to_thread(self._start_orchestrator, name)
        self.proxies[name].redirect(new.endpoint)
        await asyncio.sleep(PRESTOP_SECONDS)
        old.signal(signal.SIGTERM)
        status = await asyncio.to_thread(old.wait, EXIT_SECONDS)
        assert status == 0, f"{name} ended with {status}:\n{old.tail()}"

    async def ask(self, name: str, line: str) -> dict[str, Any]:
        """Ask a process through its window."""
        return await asyncio.to_thread(watched.ask, self._window, self.processes[name].pid, line)

    def _start_orchestrator(self, name: str) -> Process:
        assert self._cluster is not None
        return self._cluster.serve(
            "orchestrator",
            replicas_file=self.folder / "replicas",
            name=name,
            max_running=self.sizes.max_running,
            max_queued=self.sizes.max_queued,
            discovery_seconds=0.3,
            breaker_seconds=0.5,
            draft_open_timeout_ms=1000,
            recovery_seconds=RETURN_SECONDS,
            grace_seconds=60,
        ).wait_ready()

    async def _put_proxy(self, name: str, upstream: str) -> None:
        self.proxies[name] = Proxy(upstream)
        await self.proxies[name].start()

    async def _start_liar(self) -> None:
        info = await asyncio.to_thread(verify_info, self.processes[VERIFIES[0]].endpoint)
        self._liar, endpoint = fake_drafts.serve(HostileDraft(info))
        await self._put_proxy(LIAR, endpoint)

    def _list(self, *names: str) -> None:
        """Write the file that the orchestrator discovers replicas by, as one step."""
        self._listed = list(names)
        lines = [
            f"{name.partition('-')[0]} {self.proxies[name].endpoint}\n" for name in names if name != LIAR
        ]
        lines += [f"draft {self.proxies[LIAR].endpoint}\n" for name in names if name == LIAR]
        fresh = self.folder / "replicas.new"
        fresh.write_text("".join(lines))
        fresh.replace(self.folder / "replicas")

    async def _usable(self, orchestrator: str) -> dict[str, int]:
        """By kind, how many replicas an orchestrator can use."""
        async with grpc.aio.insecure_channel(self.proxies[orchestrator].endpoint) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with suppress(grpc.aio.AioRpcError):
                info = await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=5)
                return {"verify": info.verify_replicas, "draft": info.draft_replicas}
        return {"verify": -1, "draft": -1}

    @property
    def _window(self) -> str:
        return f"faults-{os.getpid()}-{id(self):x}"


__all__ = ["PROCESSES", "Sizes", "System"]
