"""llama.cpp's server as an arm: prompts as token ids to /completion, tokens as a stream of events."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.arms.base import PEER
from benchmarks.samples import SampledRequest
from benchmarks.workload import SEED, Cell, Tokens
from scripts.child import Child, ChildError

HOST = "127.0.0.1"
START_SECONDS = 120.0
SAME_DELIVERY = 0.0005
"""Seconds within which tokens count as delivered together; no pass of a model worth measuring is as short."""


def add(arrivals: list[tuple[float, int]], now: float, count: int) -> None:
    """Note tokens that arrived. The server sends an event per token; those of one pass are one delivery."""
    if arrivals and now - arrivals[-1][0] < SAME_DELIVERY:
        start, before = arrivals.pop()
        arrivals.append((start, before + count))
    else:
        arrivals.append((now, count))


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def server_command(
    server: Path,
    target: Path,
    draft: Path | None,
    tokens: int,
    threads: int,
    slots: int,
    context: int,
    port: int,
) -> list[str]:
    """The command line of a server with `slots` sequences of `context` tokens."""
    count = str(threads)
    command = [str(server), "-m", str(target), "-t", count, "-tb", count, "-np", str(slots)]
    command += ["-c", str(context * slots), "--host", HOST, "--port", str(port), "--no-webui"]
    if draft is not None:
        command += ["-md", str(draft), "--spec-type", "draft-simple", "-td", count, "-tbd", count]
        command += ["--spec-draft-n-max", str(tokens)]
    return command


class LlamaArm:
    """One server, ready to answer."""

    kind = PEER

    def __init__(self, name: str, server: Child, port: int, *, devices: int, speculates: bool) -> None:
        self.name = name
        self.devices = devices
        self.speculates = speculates
        self._server = server
        self._port = port
        self._wait_ready()
        self.engine = f"llama.cpp {json.loads(self._get('/props'))['build_info']}"

    def runs(self, cell: Cell) -> bool:
        """True for cells without a network."""
        return not cell.round_trip_ms

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Send all prompts at once, each from a thread of its own."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(
                pool.map(lambda prompt: self._one(prompt, tokens, cell.temperature, started), prompts)
            )

    def _one(self, prompt: Tokens, tokens: int, temperature: float, started: float) -> SampledRequest:
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": True,
        }
        body |= {"cache_prompt": False, "seed": SEED, "temperature": temperature}
        body |= {"samplers": ["temperature"] if temperature else ["top_k"], "top_k": 0 if temperature else 1}
        found: list[int] = []
        arrivals: list[tuple[float, int]] = []
        made = accepted = 0
        for event in self._events(body):
            if new := event.get("tokens", []):
                add(arrivals, time.perf_counter() - started, len(new))
                found += new
            made = event.get("tokens_predicted", made)
            accepted = event.get("timings", {}).get("draft_n_accepted", accepted)
        if kept := made - len(found):  # the bytes of an unfinished character are not sent
            add(arrivals, time.perf_counter() - started, kept)
        return SampledRequest(tuple(found), tuple(arrivals), max(1, made - 1 - accepted))

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=600)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ChildError(f"{self.name}: {response.status} {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
        connection.close()

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not self._healthy():
            if not self._server.running or time.monotonic() > end:
                raise ChildError(f"{self.name} did not start; see {self._server.log}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            return bool(self._get("/health"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        """The body; empty when the status is not 200."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else b""
        finally:
            connection.close()
