"""`outrider bench`: connects, sends the load, and reports the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider import __version__
from outrider.cli.bench import machine, prompts
from outrider.cli.bench.arrivals import ArrivalPattern, ClosedLoop
from outrider.cli.bench.connect import reached
from outrider.cli.bench.figures import summarize
from outrider.cli.bench.flags import check, load_of
from outrider.cli.bench.generator import Clock, LoadTally, drive
from outrider.cli.bench.progress import shown
from outrider.cli.bench.report import LoadRun, record, table
from outrider.cli.bench.target import Ask, BenchTarget, Prompt, Served
from outrider.cli.files import write_file

INTERRUPTED = 130


@dataclass(slots=True)
class BenchState:
    """What is known of a run so far; kept outside of it, so that it is still there after an interrupt."""

    served: Served | None = None
    tally: LoadTally = field(default_factory=LoadTally)
    clock: Clock = field(default_factory=Clock)


def bench(arguments: argparse.Namespace) -> int:
    """Run a load and report it. Returns 0, 1 if a request failed, 130 after Ctrl-C.

    Raises:
        OutriderError: the flags are wrong, or the target cannot be reached, or a warm-up request failed.
    """
    check(arguments)
    given = prompts.read_prompts(arguments.prompts) if arguments.prompts else None
    state, status = BenchState(), 0
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_measure(arguments, given, state))
    except KeyboardInterrupt:
        status = INTERRUPTED
    if state.served is not None and state.tally.begun:
        _report(arguments, state, state.served)
    return status or int(state.tally.failed > 0)


def setting(arguments: argparse.Namespace) -> str:
    """One line that describes the load."""
    rate = arguments.request_rate
    load = f"concurrency {arguments.concurrency or 1}" if rate is None else f"{rate:g} requests/s"
    source = arguments.prompts or f"{arguments.random_prompt_tokens} random tokens"
    mode = "" if arguments.openai else f", mode {arguments.mode or 'auto'}"
    return (
        f"{arguments.requests} requests, {load}, prompts: {source}, "
        f"at most {arguments.max_tokens} new tokens, temperature {arguments.temperature:g}{mode}"
    )


async def _measure(arguments: argparse.Namespace, given: Sequence[Prompt] | None, state: BenchState) -> None:
    rng = random.Random(arguments.seed or 0)
    load = load_of(arguments, rng)
    async with reached(arguments) as target:
        asks = _asks(arguments, _prompts(arguments, given, target.served, rng))
        measured, warm_up = asks[: arguments.requests], asks[arguments.requests :]
        await _warm_up(load, warm_up, target, state.clock)
        state.served = target.served
        async with shown("measuring", state.tally, len(measured), state.clock):
            await drive(load, measured, target, state.tally, state.clock)


async def _warm_up(load: ArrivalPattern, asks: Sequence[Ask], target: BenchTarget, clock: Clock) -> None:
    """Send the warm-up requests, which do not count; the first that fails ends the run."""
    if not asks:
        return
    tally = LoadTally()
    async with shown("warming up", tally, len(asks), clock):
        await drive(
            load if isinstance(load, ClosedLoop) else ClosedLoop(len(asks)), asks, target, tally, clock
        )
    for outcome in tally.outcomes:
        if outcome.error is not None:
            raise outcome.error


def _prompts(
    arguments: argparse.Namespace, given: Sequence[Prompt] | None, served: Served, rng: random.Random
) -> list[Prompt]:
    """The prompts of the measured requests, then those of the warm-up, which differ if there are enough."""
    count = arguments.requests + arguments.warm_up
    if given is not None:
        found = prompts.take(given, count)
    else:
        length = arguments.random_prompt_tokens
        if served.vocabulary is None or arguments.chat:
            found = prompts.random_words(count, length, rng)
        else:
            found = prompts.random_ids(count, length, served.vocabulary, served.eos_token_ids, rng)
    if arguments.chat:
        return [prompts.conversation(prompt) for prompt in found]
    return [prompts.plain(prompt) for prompt in found] if arguments.openai else found


def _asks(arguments: argparse.Namespace, found: Sequence[Prompt]) -> list[Ask]:
    seed = arguments.seed
    return [Ask(index, prompt, None if seed is None else seed + index) for index, prompt in enumerate(found)]


def _report(arguments: argparse.Namespace, state: BenchState, served: Served) -> None:
    tally = state.tally
    run = LoadRun(
        served=served,
        setting=setting(arguments),
        requests=arguments.requests,
        begun=tally.begun,
        outcomes=tally.outcomes,
        summary=summarize(tally.outcomes, arguments.slo),
        slo=arguments.slo,
    )
    print(table(run))
    if arguments.json:
        found = record(run, machine.describe(), ["outrider", *sys.argv[1:]], __version__)
        write_file("--json", arguments.json, json.dumps(found, indent=1) + "\n")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """An event loop that costs the measured machine little; None: the standard one."""
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return None
    return uvloop.new_event_loop
