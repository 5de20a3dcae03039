"""Runs the services on this machine during a block of code, for the demo and the benchmarks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from outrider.client import Client
from scripts.child import ROOT, Child, ChildError
from scripts.deepen import LARGE, LARGE_DRAFT, LARGER, Shape, deepen
from scripts.widen import DEMO_INTERMEDIATE_SIZE, widen

TARGET, DRAFT = ROOT / "models/demo/target", ROOT / "models/demo/draft"
WIDE_TARGET = ROOT / ".cache/demo-target-216m"
START_SECONDS = 300.0


def widened_target() -> Path:
    """The demo target widened to 216 M parameters; made once."""
    if not (WIDE_TARGET / "config.json").exists():
        print("Widening the target to 216 M parameters: same outputs, the weight traffic of a larger model.")
        widen(TARGET, WIDE_TARGET, DEMO_INTERMEDIATE_SIZE)
    return WIDE_TARGET


def large_target() -> Path:
    """The demo target in a model of 1,047 M parameters; made once."""
    return _deepened(TARGET, ROOT / ".cache/demo-target-1047m", LARGE)


def larger_target() -> Path:
    """The demo target in a model of 2,919 M parameters; made once."""
    return _deepened(TARGET, ROOT / ".cache/demo-target-2919m", LARGER)


def large_draft() -> Path:
    """The demo draft in a model of 109 M parameters; made once."""
    return _deepened(DRAFT, ROOT / ".cache/demo-draft-109m", LARGE_DRAFT)


def _deepened(source: Path, folder: Path, shape: Shape) -> Path:
    if not (folder / "config.json").exists():
        print(f"Embedding {source.name} in {folder.name}: same outputs, the shape of a larger model.")
        deepen(source, folder, shape)
    return folder


def metric(url: str, name: str) -> float:
    """A metric of a Prometheus page, summed over its labels."""
    with urlopen(url, timeout=10) as response:
        page = str(response.read().decode())
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M))


@contextmanager
def services(target: Path, dtype: str, log: Path, weights: str = "full") -> Iterator[dict[str, str]]:
    """Run `outrider up` with the demo draft until the block ends; yields its ready line: `endpoint` for gRPC,
    and `http`, the URL for OpenAI's clients.

    Each service has one thread, and each model a core of its own if the machine has two.
    """
    models = ["--target", str(target), "--draft", str(DRAFT)]
    flags = [*models, "--weights", weights, "--dtype", dtype, "--device", "cpu", "--port", "0"]
    with Child([sys.executable, "-m", "outrider", "up", *flags], log) as up:
        try:
            ready = up.receive(START_SECONDS)
        except ChildError as error:
            raise SystemExit(f"The services did not start: {error}") from None
        yield ready


def serve(stack: ExitStack, folder: Path, service: str, name: str, *flags: str) -> Child:
    """Start `outrider serve` on free ports, with its log in `folder`; it ends with the stack."""
    always = ["--name", name, "--port", "0", "--metrics-port", "0", "--parent-pid", str(os.getpid())]
    command = [sys.executable, "-m", "outrider", "serve", service, *always, *flags]
    return stack.enter_context(Child(command, folder / f"{name}.log"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Which models run where, without prefix caches: draft replicas by name, CPU lists, arithmetic."""

    target: Path
    drafts: Mapping[str, Path]
    dtype: str
    folder: Path
    """Folder for logs."""
    verify_cpus: str = ""
    draft_cpus: str = ""
    threads: int = 1
    weights: str = "full"
    """Rounding of the target's weights."""


class LocalServices:
    """One verify replica, the draft replicas, and an orchestrator for every pair of draft and network."""

    def __init__(self, layout: Deployment, stack: ExitStack) -> None:
        self._layout = layout
        self._stack = stack
        self._proxies: list[Child] = []
        self._orchestrators: dict[tuple[str, bool], str] = {}
        self.ready: dict[str, dict[str, str]] = {}
        """The ready line of every process, by name."""
        starting = {"verify": self._replica("verify", "verify", layout.target, layout.verify_cpus)}
        for name, folder in layout.drafts.items():
            starting[f"draft-{name}"] = self._replica("draft", f"draft-{name}", folder, layout.draft_cpus)
        for name, child in starting.items():
            self.ready[name] = child.receive(START_SECONDS)

    def endpoint(self, draft: str, remote: bool = False) -> str:
        """Endpoint of the orchestrator that uses a draft; `remote` puts the replicas behind proxies."""
        key = draft, remote
        if key not in self._orchestrators:
            self._orchestrators[key] = self._orchestrator(draft, remote)
        return self._orchestrators[key]

    def set_round_trip(self, milliseconds: float) -> None:
        """Set the delay between a remote orchestrator and its replicas from now on."""
        for proxy in self._proxies:
            proxy.ask({"round_trip_ms": milliseconds}, timeout=10.0)

    def metrics(self, name: str) -> str:
        """The Prometheus page of a process in `ready`."""
        with urlopen(self.ready[name]["metrics"], timeout=10) as response:
            return str(response.read().decode())

    def _replica(self, service: str, name: str, model: Path, cpus: str) -> Child:
        layout = self._layout
        flags = ["--model", str(model), "--dtype", layout.dtype, "--threads", str(layout.threads)]
        flags += ["--device", "cpu", "--no-prefix-cache"]
        flags += ["--cpus", cpus] if cpus else []
        if service == "verify" and layout.draft_cpus:
            flags += ["--helper-cpus", layout.draft_cpus]
        flags += ["--weights", layout.weights] if service == "verify" else []
        return serve(self._stack, layout.folder, service, name, *flags)

    def _orchestrator(self, draft: str, remote: bool) -> str:
        flags = ["--cpus", self._layout.draft_cpus] if self._layout.draft_cpus else []
        for kind, name in (("verify", "verify"), ("draft", f"draft-{draft}")):
            endpoint = self.ready[name]["endpoint"]
            flags += [f"--{kind}", self._proxied(endpoint, name) if remote else endpoint]
        name = f"orchestrator-{draft}-{'remote' if remote else 'local'}"
        child = serve(self._stack, self._layout.folder, "orchestrator", name, *flags)
        self.ready[name] = child.receive(START_SECONDS)
        endpoint = self.ready[name]["endpoint"]
        wait_for_drafts(endpoint)
        return str(endpoint)

    def _proxied(self, endpoint: str, name: str) -> str:
        command = [sys.executable, "-m", "scripts.proxy", "--to", endpoint]
        log = self._layout.folder / f"proxy-{name}.log"
        proxy = self._stack.enter_context(Child(command, log))
        self._proxies.append(proxy)
        return str(proxy.receive(START_SECONDS)["endpoint"])


@contextmanager
def fleet(layout: Deployment) -> Iterator[LocalServices]:
    """Run the processes of a layout until the block ends.

    Raises:
        ChildError: a process did not start; the message has the end of its log.
    """
    layout.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield LocalServices(layout, stack)


def wait_for_drafts(endpoint: str, count: int = 1) -> None:
    """Block until an orchestrator has seen its draft replicas."""
    end = time.monotonic() + START_SECONDS
    with Client(endpoint) as client:
        while client.model_info().draft_replicas < count:
            if time.monotonic() > end:
                raise ChildError(f"{endpoint} found too few draft replicas")
            time.sleep(0.05)
