"""Measures how long a request waits when the replica that serves it is killed.

    python -m scripts.recovery --kills 100

One request runs at a time. Once it streams, the draft (or verify) replica that holds its session gets
SIGKILL, and the clock runs until the next committed token reaches the client. For a draft, that is the first
chunk after the signal; for a verify replica, it is the first chunk that another replica committed, which ends
the longest silence. If the statistics of the request show no loss, it had ended before the kill, which does
not count. Then the replica starts again on the same port. Every continuation is compared with that of a run
without kills.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc
from scripts.console import new_parser, progress, run
from tests.faults.harness.plan import DRAFTS, VERIFIES
from tests.faults.harness.system import Sizes, System
from tests.integration.client import draft_info, request, verify_info
from tests.integration.prompts import code_prompts

TOKENS = 600
CHUNKS = 3
"""Number of chunks after which the replica is killed."""
ROOMY = Sizes(kv_tokens=16384)
SAMPLING: Sequence[dict[str, Any]] = ({}, {"temperature": 1.0})


@dataclass(slots=True)
class ReceivedStream:
    """One request: its tokens, and the arrival time of each chunk."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    complete: generation_pb2.Complete | None = None
    killed_at: float = 0.0

    def next_token(self) -> float:
        """Seconds from the kill to the first chunk after it."""
        return next(at for at in self.arrivals if at > self.killed_at) - self.killed_at

    def end_of_silence(self) -> float:
        """Seconds from the kill to the end of the longest time without a chunk after it."""
        times = [self.killed_at, *(at for at in self.arrivals if at > self.killed_at)]
        _, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
        return end - self.killed_at


class Kills:
    """Kills replicas of one kind repeatedly while they serve a request."""

    def __init__(self, system: System, kind: str) -> None:
        self.system = system
        self.names = VERIFIES if kind == "verify" else DRAFTS
        self.seconds: list[float] = []
        self.wrong = 0
        self.missed = 0
        self._kind = kind
        self._info: Callable[[str], Any] = verify_info if kind == "verify" else draft_info
        self._expected: dict[int, list[int]] = {}

    async def once(self, number: int) -> None:
        """Kill a replica once and restart it."""
        which = number % len(SAMPLING)
        if which not in self._expected:
            self._expected[which] = (await self._stream(which)).tokens
        victims: list[str] = []
        stream = await self._stream(which, victims)
        if victims:
            await self.system.start_again(victims[0])
            await self.system.whole()
        self.wrong += stream.tokens != self._expected[which]
        assert stream.complete is not None
        statistics = stream.complete.speculation
        losses = statistics.verify_losses if self._kind == "verify" else statistics.draft_losses
        if not victims or losses == 0:
            self.missed += 1
            return
        self.seconds.append(stream.end_of_silence() if self._kind == "verify" else stream.next_token())

    async def _stream(self, which: int, victims: list[str] | None = None) -> ReceivedStream:
        """Read one request; with `victims`, kill the replica that holds it and add its name."""
        message = request(code_prompts(8)[5], max_tokens=TOKENS, seed=5, **SAMPLING[which])
        stream = ReceivedStream()
        async with grpc.aio.insecure_channel(self.system.endpoint) as channel:
            killing: asyncio.Task[None] | None = None
            async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(message):
                kind = response.WhichOneof("event")
                if kind == "complete":
                    stream.complete = response.complete
                if kind != "chunk":
                    continue
                stream.arrivals.append(time.monotonic())
                stream.tokens += response.chunk.token_ids
                if victims is not None and len(stream.arrivals) == CHUNKS:
                    killing = asyncio.create_task(self._kill(stream, victims))
            if killing is not None:
                await killing
        return stream

    async def _kill(self, stream: ReceivedStream, victims: list[str]) -> None:
        """Kill the replica that holds the session, as soon as one does."""
        while stream.complete is None:
            for name in self.names:
                process = self.system.processes[name]
                info = await asyncio.to_thread(self._info, process.endpoint)
                if info.sessions and stream.complete is None:
                    process.signal(signal.SIGKILL)
                    stream.killed_at = time.monotonic()
                    victims.append(name)
                    return

    def figures(self) -> dict[str, Any]:
        """Median and worst figures."""
        return {
            "kills": len(self.seconds),
            "median_ms": round(1e3 * median(self.seconds), 1),
            "worst_ms": round(1e3 * max(self.seconds), 1),
            "came_too_late": self.missed,
            "wrong": self.wrong,
        }


async def measure(kills: int, folder: Path) -> int:
    """Kill replicas of both kinds, `kills` times each; returns the number of wrong texts."""
    system = System(folder, ROOMY)
    wrong = 0
    try:
        await system.start()
        for kind in ("draft", "verify"):
            killer = Kills(system, kind)
            number = 0
            while len(killer.seconds) < kills and number < 2 * kills + 5:
                await killer.once(number)
                number += 1
                if number % 10 == 0:
                    progress(f"{kind}: {number} of {kills} kills")
            print(json.dumps({kind: killer.figures()}), flush=True)
            wrong += killer.wrong
    finally:
        await system.stop()
    return wrong


def main() -> int:
    """Measure and print; returns 1 if a text was wrong."""
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each kind")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if asyncio.run(measure(flags.kills, Path(folder))) else 0


if __name__ == "__main__":
    run(main)
