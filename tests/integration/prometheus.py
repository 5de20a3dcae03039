"""A real Prometheus that scrapes services of the tests."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.integration.client import eventually
from tests.integration.cluster import ROOT

RULES = ROOT / "k8s/components/alerts/rules.yaml"


def needs(program: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install prometheus)")
    return found


def write_rules(folder: Path) -> Path:
    """The alert rules as Prometheus reads them: what the operator takes out of the resource."""
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text())["spec"]))
    return path


class Prometheus:
    """Its HTTP API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer; fails the test when the query was refused."""
        with urlopen(f"{self._address}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """The values of an instant query, one per series."""
        result = self.get("query", query=expression)["result"]
        return [float(series["value"][1]) for series in result]

    def ready(self) -> bool:
        """It answers."""
        try:
            with urlopen(f"{self._address}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False


@contextmanager
def prometheus(targets: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """Scrapes `targets` (address by job) every half second and evaluates the alert rules."""
    program = needs("prometheus")
    jobs = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(write_rules(folder))],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(f"http://{address}")
        eventually(server.ready, "Prometheus is ready", 20)
        yield server
    finally:
        process.kill()
        process.wait(10)
