"""Commands of `python -m simulator`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from outrider.protocol.errors import OutriderError
from simulator.capacity import STUDIES, run
from simulator.modelled import PAIRS, modelled
from simulator.profile import FOLDER, Profile
from simulator.report import HEADER, line
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology
from simulator.traces import load_corpus

TRACES = "demo_pair.json"
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main() -> None:
    """Run the command line; a command that cannot be carried out ends with a sentence and status 1."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator",
        description="Run the project's scheduling code on a virtual clock.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    _add_run(_command(commands, "run", "simulate and print a table"))
    _add_record(_command(commands, "record", "record a pair's texts"))
    _add_measure(_command(commands, "measure", "measure a pair's times on this machine"))
    _add_capacity(_command(commands, "capacity", "the runs and pictures of docs/capacity.md"))
    _add_sensitivity(
        _command(commands, "sensitivity", "how much each constant that controls speculation matters")
    )
    flags = parser.parse_args()
    try:
        flags.go(flags)
    except (OutriderError, OSError) as error:
        sys.exit(f"simulator: {error}")


def _command(commands: _Commands, name: str, help: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def find_profile(name: str) -> Profile:
    """A profile of the package or a modelled one by its name, or one from a file.

    Raises:
        ConfigError: there is no such profile.
    """
    if name in PAIRS:
        return modelled(name)
    return Profile.read(Path(name) if name.endswith(".json") else FOLDER / f"{name}.json")


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a reader of values that are separated by commas."""

    def values(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return values


def _add_run(run: argparse.ArgumentParser) -> None:
    add = run.add_argument
    add("--profile", default="widened", help=f"times: a name in profiles/, a file, or {', '.join(PAIRS)}")
    arms = f"arms to compare: {', '.join(ArmKind)}"
    add("--mode", type=_several(ArmKind), default="auto,off,sequential", help=arms)
    add("--sessions", type=_several(int), default="1,8,32", help="sessions at once")
    add("--temperature", type=_several(float), default="0", help="temperatures of the recorded texts")
    add("--rtt-ms", type=_several(float), default="0", help="round trip from the orchestrator to a replica")
    add("--verify", type=int, default=1, help="verify replicas")
    add("--draft", type=int, default=1, help="draft replicas")
    add("--orchestrators", type=int, default=1)
    add("--rounds", type=int, default=1, help="requests of each session, one after the other")
    add("--prompt-tokens", type=int, default=32, help="0: the recorded texts from their beginning")
    add("--new-tokens", type=int, default=128)
    add("--warm-up", type=int, default=0, help="requests that do not count")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write all figures here")
    run.set_defaults(go=_run)


def _run(flags: argparse.Namespace) -> None:
    profile = find_profile(flags.profile)
    print(f"{profile.name} ({profile.origin}): {profile.note}\n{HEADER}")
    reports = []
    for topology, load in _cases(flags):
        reports.append(simulate(profile, topology, load))
        print(line(reports[-1]), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")


def _cases(flags: argparse.Namespace) -> Iterator[tuple[Topology, Load]]:
    lists = (flags.temperature, flags.rtt_ms, flags.sessions, flags.mode)
    for temperature, rtt, sessions, arm in product(*lists):
        topology = Topology(
            arm=arm,
            verify_replicas=flags.verify,
            draft_replicas=flags.draft,
            orchestrators=flags.orchestrators,
            rtt=rtt / 1e3,
            max_sessions=max(64, sessions),
        )
        yield (
            topology,
            Load(
                sessions=sessions,
                rounds=flags.rounds,
                prompt_tokens=flags.prompt_tokens,
                new_tokens=flags.new_tokens,
                warm_up=flags.warm_up,
                temperature=temperature,
                seed=flags.seed,
            ),
        )


def _add_record(record: argparse.ArgumentParser) -> None:
    _add_pair(record)
    record.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    record.add_argument("--tokens", type=int, default=256, help="tokens of each text")
    record.add_argument("--out", type=Path, default=FOLDER / TRACES)
    record.set_defaults(go=_record)


def _record(flags: argparse.Namespace) -> None:
    from simulator.record import record

    record(flags.target, flags.draft, flags.temperatures, flags.tokens, flags.out)


def _add_measure(measure: argparse.ArgumentParser) -> None:
    _add_pair(measure)
    measure.add_argument("--dtype", default="bfloat16")
    measure.add_argument("--traces", default=TRACES, help="the pair's texts, of the package or a path")
    measure.add_argument("--out", type=Path, required=True, help="file of the profile")
    measure.set_defaults(go=_measure)


def _measure(flags: argparse.Namespace) -> None:
    from simulator.measure import measure

    texts = load_corpus(FOLDER / flags.traces, 0.0).traces
    profile = measure(flags.target, flags.draft, flags.dtype, flags.traces, texts)
    flags.out.write_text(profile.model_dump_json(indent=1) + "\n")


def _add_pair(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", type=Path, default=Path("models/demo/target"))
    command.add_argument("--draft", type=Path, default=Path("models/demo/draft"))


def _add_capacity(capacity: argparse.ArgumentParser) -> None:
    capacity.add_argument("--studies", nargs="+", default=list(STUDIES), choices=STUDIES)
    capacity.add_argument("--folder", type=Path, default=Path("out/capacity"), help="for the figures")
    capacity.add_argument("--docs", type=Path, default=Path("docs"), help="for the pictures")
    capacity.set_defaults(go=_capacity)


def _capacity(flags: argparse.Namespace) -> None:
    from simulator.plots import draw, read

    flags.folder.mkdir(parents=True, exist_ok=True)
    run(flags.folder, flags.studies)
    draw(read(flags.folder), flags.docs)


def _add_sensitivity(sensitivity: argparse.ArgumentParser) -> None:
    sensitivity.add_argument("names", nargs="*", help="constants; none: all of the table")
    sensitivity.set_defaults(go=_sensitivity)


def _sensitivity(flags: argparse.Namespace) -> None:
    from simulator.sensitivity import run

    for row in run(flags.names):
        print(row, flush=True)
