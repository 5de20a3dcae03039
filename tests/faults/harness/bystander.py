"""What another caller feels, and what the orchestrator's memory does, while somebody attacks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc

from outrider.v1 import generation_pb2_grpc
from tests.faults.harness import attacks
from tests.faults.harness.watch import PAGE_BYTES

PERIOD_SECONDS = 0.25
"""From one small request to the next."""
SETTLE_SECONDS = 10.0
"""In which memory may return after the attack."""
LOST_SECONDS = 30.0


@dataclass(slots=True)
class Felt:
    """One attack: seconds of small requests, statuses of those that failed, memory in MiB."""

    attack: str
    seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    before: float = 0.0
    peak: float = 0.0
    after: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    """What the attacker was told."""

    def row(self) -> str:
        """A line of a table; docs/faults.md has the figures."""
        times = f"{median(self.seconds):.2f} | {max(self.seconds):.2f}" if self.seconds else "- | -"
        lost = f"{len(self.lost)} lost" if self.lost else "none"
        told = ", ".join(f"{count} {name}" for name, count in sorted(self.answers.items()))
        memory = f"{self.before:.0f} / {self.peak:.0f} / {self.after:.0f}"
        return f"| {self.attack} | {times} | {lost} | {memory} | {told} |"


HEADER = (
    "| attack | small request, median s | worst s | failed | memory before / peak / after, MiB | "
    "the attacker was told |\n|---|---|---|---|---|---|"
)


async def feel(attack: str, endpoint: str, pid: int, seconds: float, tokens: tuple[str, str]) -> Felt:
    """Attack for so many seconds with one bearer token, and ask for little with another."""
    felt = Felt(attack)
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await _ask(stub, felt, tokens[1])
        felt.seconds.clear()
        felt.before = felt.peak = memory(pid)
        sampling = asyncio.create_task(_sample(felt, pid))
        with _attacking(attack, endpoint, tokens[0], felt):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await _ask(stub, felt, tokens[1])
                await asyncio.sleep(PERIOD_SECONDS)
        await _ask(stub, felt, tokens[1])
        await asyncio.sleep(SETTLE_SECONDS)
        sampling.cancel()
        felt.after = memory(pid)
    return felt


async def _ask(stub: generation_pb2_grpc.GenerationServiceStub, felt: Felt, token: str) -> None:
    began = time.monotonic()
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        async for _ in stub.Generate(attacks.asking(), metadata=metadata, timeout=LOST_SECONDS):
            pass
    except grpc.aio.AioRpcError as error:
        felt.lost.append(f"{error.code().name}: {error.details()}")
    felt.seconds.append(time.monotonic() - began)


async def _sample(felt: Felt, pid: int) -> None:
    while True:
        felt.peak = max(felt.peak, memory(pid))
        await asyncio.sleep(0.05)


def memory(pid: int) -> float:
    """What a process and its children hold, in MiB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for one in (pid, *map(int, children)):
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:
            continue  # it has just ended
    return total * PAGE_BYTES / 2**20


@contextmanager
def _attacking(name: str, endpoint: str, token: str, felt: Felt) -> Iterator[None]:
    command = [sys.executable, "-m", attacks.__name__, name, endpoint, token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=attacks.ROOT) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                felt.answers = json.loads(process.communicate(timeout=20)[0] or "{}")
            except subprocess.TimeoutExpired:
                process.kill()
