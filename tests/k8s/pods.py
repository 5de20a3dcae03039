"""Pods without a cluster: each container's command and environment in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.k8s.manifests import ROOT, SERVICES, Manifests, container, environment, pod

ADDRESSES = {service: f"10.77.0.{10 + number}" for number, service in enumerate(SERVICES)}
POLL_SECONDS = 0.25


def possible() -> bool:
    """Whether this machine lets us make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def network() -> Iterator[None]:
    """A bridge, and for every service a network namespace in which the others' names resolve."""
    with _removed():
        _ip("link add outrider type bridge", "addr add 10.77.0.1/24 dev outrider", "link set outrider up")
        names = {**ADDRESSES, "orchestrator-pods": ADDRESSES["orchestrator"]}
        hosts = "".join(f"{address} {service}\n" for service, address in names.items())
        for service, address in ADDRESSES.items():
            space = _namespace(service)
            folder = Path("/etc/netns") / space
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            _ip(
                f"netns add {space}",
                f"link add {space[:15]} type veth peer name eth0 netns {space}",
                f"link set {space[:15]} master outrider up",
                f"-n {space} addr add {address}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {space} link set lo up",
            )
        yield


class Pod:
    """One container of the manifests as a process."""

    def __init__(self, manifests: Manifests, service: str, mounts: Mapping[str, Path], folder: Path) -> None:
        """`mounts` are folders of this machine by the path that they have in the container."""
        self.service = service
        self.log = folder / f"{service}.log"
        self._probes = container(manifests, service)
        variables = {name: _moved(value, mounts) for name, value in environment(manifests, service).items()}
        command = [sys.executable, "-m", "outrider", *self._probes["args"]]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                inside(service, command),
                env=_environment(folder) | variables,
                cwd=folder,
                stderr=log,
                stdout=log,
            )

    def probe(self, kind: str) -> bool:
        """What a kubelet would learn from the container's `kind`Probe."""
        probe = self._probes[f"{kind}Probe"]
        return self._http(probe["httpGet"]) if "httpGet" in probe else self._grpc(probe["grpc"])

    def _http(self, asked: Mapping[str, str]) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self._probes["ports"]}
        url = f"{asked['scheme'].lower()}://{ADDRESSES[self.service]}:{ports[asked['port']]}{asked['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            return False

    def _grpc(self, asked: Mapping[str, str | int]) -> bool:
        with grpc.insecure_channel(f"{ADDRESSES[self.service]}:{asked['port']}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            request = health_pb2.HealthCheckRequest(service=asked["service"])
            try:
                status: int = check(request, timeout=5).status
            except grpc.RpcError:
                return False
            return status == health_pb2.HealthCheckResponse.SERVING

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait for what a probe should say; fails with the log when the process ends or time runs out."""
        give_up = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up, self.log.read_text()
            time.sleep(POLL_SECONDS)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self._process.wait(10)


def client(folder: Path, *arguments: str, token: str = "") -> subprocess.Popen[str]:
    """`outrider generate` in a pod beside the services."""
    command = [sys.executable, "-m", "outrider", "generate", *arguments]
    variables = _environment(folder) | {"OUTRIDER_TOKEN": token}
    return subprocess.Popen(
        inside("orchestrator", command),
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def secret_mounts(manifests: Manifests, service: str, secrets: Mapping[str, Path]) -> dict[str, Path]:
    """The folders of a pod's Secrets by where they are mounted."""
    volumes = {
        one["name"]: one["secret"]["secretName"]
        for one in pod(manifests, service)["volumes"]
        if "secret" in one
    }
    mounts = container(manifests, service)["volumeMounts"]
    return {one["mountPath"]: secrets[volumes[one["name"]]] for one in mounts if one["name"] in volumes}


def inside(service: str, command: list[str]) -> list[str]:
    """The command, run in the service's network namespace."""
    return ["ip", "netns", "exec", _namespace(service), *command]


def _namespace(service: str) -> str:
    return f"or-{service}"


@contextmanager
def _removed() -> Iterator[None]:
    """Nothing of the network is there before, and nothing is left afterwards."""
    _remove()
    try:
        yield
    finally:
        _remove()


def _remove() -> None:
    for service in SERVICES:
        subprocess.run(["ip", "netns", "delete", _namespace(service)], capture_output=True)
        shutil.rmtree(Path("/etc/netns") / _namespace(service), ignore_errors=True)
    subprocess.run(["ip", "link", "delete", "outrider"], capture_output=True)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


def _moved(value: str, mounts: Mapping[str, Path]) -> str:
    """A path below a mount as it is on this machine."""
    for mount, folder in mounts.items():
        if value.startswith(f"{mount}/"):
            return str(folder / value.removeprefix(f"{mount}/"))
    return value


def _environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}
