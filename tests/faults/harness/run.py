"""One run: start, learn the tokens without faults, load and faults, quiet, leaks, report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.harness.load import Callers, Finished, Journal
from tests.faults.harness.plan import FAULTS_AT_ONCE, Ask, Fault, Kind, Mix, Planner, draw_cases
from tests.faults.harness.system import RETURN_SECONDS, Sizes, System
from tests.faults.harness.watch import Life, Watch, growth
from tests.integration.hostile_draft import ATTACKS
from tests.integration.prompts import code_prompts, long_prompt

BURST_ASKS = 16
TELL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    seed: int
    folder: Path
    """For logs."""
    requests: int = 0
    """How many; 0: until `seconds` are over."""
    seconds: float = 0.0
    workers: int = 8
    """Requests at once; bursts come on top."""
    cases: int = 20
    tokens: int = 48
    long_prompts: int = 2
    """Prompts of several prefill chunks among the cases."""
    mix: Mix = field(default_factory=Mix)
    sizes: Sizes = field(default_factory=Sizes)
    say: Callable[[str], None] = lambda line: None
    """Is told every minute how far the run is."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a fault until some request got its next token."""

    fault: Fault
    at: float
    """Seconds from the start of the load."""
    next_token_seconds: float
    mended_seconds: float
    """Until the fault was over and the process was as before."""


@dataclass(slots=True)
class Report:
    """What came of a run."""

    seed: int
    seconds: float
    outcomes: dict[str, int]
    violations: list[str]
    recoveries: list[Recovery]
    finished: list[Finished]
    lives: list[Life]
    highest: dict[str, float]
    counts: dict[str, int]
    began: float

    def summary(self) -> dict[str, Any]:
        """Figures as JSON."""
        kinds: dict[str, list[float]] = {}
        for recovery in self.recoveries:
            kinds.setdefault(str(recovery.fault.kind), []).append(recovery.next_token_seconds)
        first, whole, silences = (
            [getattr(one, name) for one in self.finished]
            for name in ("first_token_seconds", "seconds", "longest_silence_seconds")
        )
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": sum(self.outcomes.values()),
            "outcomes": dict(sorted(self.outcomes.items())),
            **self.counts,
            "violations": self.violations,
            "faults": {
                kind: {
                    "count": len(values),
                    "next_token_median_s": round(median(values), 3),
                    "next_token_worst_s": round(max(values), 3),
                }
                for kind, values in sorted(kinds.items())
            },
            "first_token_s": percentiles(first),
            "request_s": percentiles(whole),
            "longest_silence_s": percentiles(silences),
            "highest": dict(sorted(self.highest.items())),
            "memory": [growth(life) for life in self.lives if len(life.memory) >= 8],
        }

    def write(self, path: Path) -> None:
        """The summary, and every fault with its times."""
        faults = [
            {
                "fault": str(one.fault),
                "at": round(one.at, 2),
                "next_token_s": round(one.next_token_seconds, 3),
                "mended_s": round(one.mended_seconds, 2),
            }
            for one in self.recoveries
        ]
        path.write_text(json.dumps({**self.summary(), "each_fault": faults}, indent=1) + "\n")


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile and the highest of some values."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)
        for name, share in at.items()
    }


Drive = Callable[[System], Awaitable[None]]
"""What is done under load instead of the planner's faults."""


def run(options: Options, drive: Drive | None = None) -> Report:
    """Carry out a run on processes of its own; with `drive`, load goes on until that has ended."""
    return asyncio.run(_Run(options, drive).whole())


class _Run:
    def __init__(self, options: Options, drive: Drive | None) -> None:
        prompts = [*code_prompts(60), *(long_prompt(300 + 40 * n) for n in range(options.long_prompts))]
        cases = draw_cases(options.seed, options.cases, prompts)
        self.options = options
        self.drive = drive
        self.driven = False
        self.planner = Planner(options.seed, options.mix, cases, options.tokens, list(ATTACKS))
        self.system = System(options.folder, options.sizes)
        self.journal = Journal()
        self.callers = Callers(self.system, cases, self.journal)
        self.watch = Watch(self.system)
        self.recoveries: list[Recovery] = []
        self._bursts: list[asyncio.Task[None]] = []
        self._began = 0.0
        self._asks: Iterator[Ask] = self.planner.asks()

    async def whole(self) -> Report:
        """From the first process to the last check."""
        try:
            await self.system.start()
            await self.callers.learn(self.options.tokens, self.options.sizes.max_running)
            await self.watch.remember()
            await self._under_faults()
            return await self._report()
        finally:
            await self.callers.close()
            await self.system.stop()

    async def _under_faults(self) -> None:
        self._began = time.monotonic()
        watching = asyncio.gather(self.watch.run(), self._tell())
        breaking = asyncio.create_task(
            self._break_things() if self.drive is None else self._follow(self.drive)
        )
        workers = [asyncio.create_task(self._work()) for _ in range(self.options.workers)]
        await asyncio.gather(*workers)
        self.journal.end()
        breaking.cancel()
        with suppress(asyncio.CancelledError):
            await breaking
        await asyncio.gather(*self._bursts)
        try:
            await self.system.whole()
        except AssertionError as error:
            self.journal.violations.append(str(error))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_SECONDS)
            minutes = (time.monotonic() - self._began) / 60
            wrong = len(self.journal.violations) + len(self.watch.violations)
            faults = len(self.recoveries)
            self.options.say(
                f"{minutes:.0f} min: {self.journal.begun} requests, {faults} faults, {wrong} violations"
            )

    def _next_ask(self) -> Ask | None:
        return None if self._over() else next(self._asks)

    def _over(self) -> bool:
        if self.drive is not None:
            return self.driven
        if self.options.requests:
            return self.journal.begun >= self.options.requests
        return time.monotonic() - self._began > self.options.seconds

    async def _follow(self, drive: Drive) -> None:
        try:
            await drive(self.system)
        finally:
            self.driven = True

    async def _work(self) -> None:
        while (ask := self._next_ask()) is not None:
            await self.callers.perform(ask)

    async def _break_things(self) -> None:
        """One fault after another, at most two at a time; a fault that has begun is always mended."""
        room = asyncio.Semaphore(FAULTS_AT_ONCE)
        mending: set[asyncio.Task[None]] = set()
        try:
            for fault in self.planner.faults():
                due = self.journal.begun + fault.after
                while self.journal.begun < due:
                    await self.journal.change()
                await asyncio.sleep(fault.delay)
                await room.acquire()
                task = asyncio.create_task(self._break(fault))
                mending.add(task)
                task.add_done_callback(mending.discard)
                task.add_done_callback(lambda _: room.release())
        finally:
            await asyncio.gather(*mending)

    async def _break(self, fault: Fault) -> None:
        began = time.monotonic()
        waiting = asyncio.create_task(self._next_token(began))
        try:
            if fault.kind is Kind.BURST:
                asks = islice(self._asks, BURST_ASKS)
                self._bursts += [asyncio.create_task(self.callers.perform(ask)) for ask in asks]
            await self.system.apply(fault)
        except Exception as error:
            self.journal.violations.append(f"fault {fault}: {type(error).__name__}: {error}")
        mended = time.monotonic() - began
        seconds = await waiting
        if seconds is not None:
            self.recoveries.append(Recovery(fault, began - self._began, seconds, mended))

    async def _next_token(self, began: float) -> float | None:
        """Seconds until some request gets its next token; None: none did, or the load ended before."""
        tokens = self.journal.tokens
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                while self.journal.tokens == tokens:
                    if self.journal.ended:
                        return None
                    await self.journal.change()
        except TimeoutError:
            self.journal.violations.append(f"no token for {RETURN_SECONDS:g} s")
            return None
        return time.monotonic() - began

    async def _report(self) -> Report:
        seconds = time.monotonic() - self._began
        violations = [*self.journal.violations, *self.watch.violations]
        try:
            violations += await self.watch.leaks()
        except AssertionError as error:
            violations.append(str(error))
        journal = self.journal
        counts = {
            "resumed": journal.returns,
            "refused": journal.refusals,
            "draft_losses": journal.draft_losses,
            "verify_losses": journal.verify_losses,
        }
        return Report(
            self.options.seed, seconds, dict(journal.outcomes), violations, self.recoveries, journal.finished,
            list(self.watch.lives.values()), self.watch.highest, counts, self._began,
        )  # fmt: skip
