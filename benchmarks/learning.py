"""Runs the whole circle on the demo pair: traffic turns, acceptance falls, a new draft is trained, promoted.

    python -m benchmarks.learning                       an hour; twenty minutes of it write and train

Everything is in --folder, one line per request; the same command goes on where it was stopped. The texts are
Python's library, and the pages of this project. The services run on the widened target, since the small one
is too fast for its draft; both write the same, and the draft is trained on the small one.

    code       the traffic that the draft was made for
    turned     other traffic under the same label, until the drift alarm, and as much of it again as of code
    distil     `outrider distill` on what was collected so far
    canary     the new draft as a shadow, until the orchestrator promotes it
    after      the other traffic goes on
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmarks.plot import draw_learning
from outrider.client import Client
from scripts import console
from scripts.child import ROOT
from scripts.local_services import DRAFT, TARGET, metric, serve, widened_target

Phase = Literal["code", "turned", "distil", "canary", "after", "done"]
Event = dict[str, Any]
PATIENCE = 4
"""Most requests to wait for an alarm or a promotion, as a multiple of `--requests`; then go on without it."""
PROSE = sorted((ROOT / "docs").glob("*.md"))
TASK = "mixed"
MODULES = "argparse configparser csv difflib gettext optparse pprint shlex smtplib tarfile textwrap"
PROMPT_CHARACTERS = 200


def phase_of(events: Sequence[Event], requests: int) -> Phase:
    """The phase that follows these events."""
    done = Counter(event["phase"] for event in events if event["kind"] == "request")
    seen = {event["kind"] for event in events}
    if done["code"] < requests:
        return "code"
    if done["turned"] < (requests if "alarm" in seen else PATIENCE * requests):
        return "turned"
    if "distilled" not in seen:
        return "distil"
    if "promoted" not in seen and done["canary"] < PATIENCE * requests:
        return "canary"
    return "after" if done["after"] < requests else "done"


class Diary:
    """The events so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events: list[Event] = []
        if path.exists():
            self.events = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, kind: str, **fields: Any) -> None:
        """Write down an event."""
        event = {"kind": kind, "at": round(time.time(), 1), **fields}
        self.events.append(event)
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def has(self, kind: str) -> bool:
        """True if there was an event of a kind."""
        return any(event["kind"] == kind for event in self.events)


class Services:
    """Target, drafts and orchestrator, each a process; drafts may be added."""

    def __init__(self, flags: argparse.Namespace, stack: ExitStack) -> None:
        self._flags = flags
        self._stack = stack
        self._replicas = flags.folder / "replicas"
        self._lines: list[str] = []
        target = str(flags.target or widened_target())
        self.add("verify", "verify", "--model", target)

    def add(self, service: str, name: str, *arguments: str) -> None:
        """Start a replica, and tell the orchestrator."""
        more = ("--dtype", "bfloat16") if service == "verify" else ()
        ready = self._start(service, name, *arguments, *more)
        self._lines.append(f"{service} {ready['endpoint']}")
        self._replicas.write_text("\n".join(self._lines) + "\n")

    def orchestrate(self) -> Traffic:
        """Start the orchestrator."""
        flags = self._flags
        collect = ("--collect", str(flags.folder / "tokens"), "--collect-share", "1")
        shadows = ("--shadow-share", "1", "--promote-shadows", "--discovery-seconds", "0.5")
        replicas = ("--replicas-file", str(self._replicas))
        return Traffic(self._start("orchestrator", "orchestrator", *replicas, *collect, *shadows), flags)

    def _start(self, service: str, name: str, *arguments: str) -> dict[str, str]:
        return serve(self._stack, self._flags.folder, service, name, *arguments).receive()


class Traffic:
    """Requests, one after the other, and what the orchestrator's page says."""

    def __init__(self, ready: dict[str, str], flags: argparse.Namespace) -> None:
        self._client = Client(ready["endpoint"])
        self._metrics = ready["metrics"]
        self._flags = flags

    def ask(self, prompt: str, seed: int) -> dict[str, int]:
        """One request: steps with candidates, and those of them that accepted one."""
        result = self._client.generate(
            prompt,
            max_tokens=self._flags.tokens,
            temperature=self._flags.temperature,
            seed=seed,
            ignore_eos=True,
            task=TASK,
        )
        histogram = result.generations[0].end.accepted_histogram
        return {"steps": sum(histogram), "accepted": sum(histogram[1:])}

    def count(self, name: str) -> float:
        """A counter of the orchestrator, over all its labels."""
        return metric(self._metrics, f"outrider_orchestrator_{name}_total")


def run(flags: argparse.Namespace) -> None:
    """Go through the phases that are left."""
    flags.folder.mkdir(parents=True, exist_ok=True)
    diary = Diary(flags.folder / "diary.jsonl")
    if phase_of(diary.events, flags.requests) == "done":
        return
    with ExitStack() as stack:
        services = Services(flags, stack)
        promoted = ["--shadow"] if diary.has("promoted") else []
        services.add("draft", "draft-old", "--model", str(DRAFT), *promoted)
        if diary.has("distilled"):
            _add_new(services, flags, diary)
        traffic = services.orchestrate()
        while (phase := phase_of(diary.events, flags.requests)) != "done":
            print(phase, flush=True)
            if phase == "distil":
                _distil(flags)
                diary.add("distilled")
                _add_new(services, flags, diary)
            else:
                _send(traffic, phase, flags, diary)


def _add_new(services: Services, flags: argparse.Namespace, diary: Diary) -> None:
    shadow = [] if diary.has("promoted") else ["--shadow"]
    services.add("draft", "draft-new", "--model", str(flags.folder / "draft"), *shadow)


def _send(traffic: Traffic, phase: Phase, flags: argparse.Namespace, diary: Diary) -> None:
    """Requests, until another phase comes."""
    before = {name: traffic.count(name) for name in ("drifts", "promotions")}
    done = sum(event.get("phase") == phase for event in diary.events)
    for number, prompt in enumerate(islice(prompts(phase), done, None), done):
        diary.add("request", phase=phase, **traffic.ask(prompt, number))
        if phase == "turned" and not diary.has("alarm") and traffic.count("drifts") > before["drifts"]:
            diary.add("alarm")
        if phase == "canary" and traffic.count("promotions") > before["promotions"]:
            diary.add("promoted")
        if phase_of(diary.events, flags.requests) != phase:
            return


def prompts(phase: Phase) -> Iterator[str]:
    """Yield the prompts of a phase: the same in every run, and different in every phase."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code = [library / f"{module}.py" for module in MODULES.split()]
    return windows(code if phase == "code" else PROSE, Random(phase))


def windows(files: Sequence[Path], random: Random) -> Iterator[str]:
    """Pieces of text from anywhere in some files."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    while True:
        start = random.randrange(len(text) - PROMPT_CHARACTERS)
        yield text[start : start + PROMPT_CHARACTERS]


def _distil(flags: argparse.Namespace) -> None:
    """Train, for the time that is allowed; a training that was stopped goes on."""
    if (flags.folder / "draft").exists():
        return
    models = ["--target", str(TARGET), "--draft", str(DRAFT), "--out", str(flags.folder / "draft")]
    data = ["--collected", str(flags.folder / "tokens"), "--temperature", str(flags.temperature)]
    data += ["--answers", str(flags.answers), "--tokens", str(2 * flags.tokens)]
    how = ["--minutes", str(flags.minutes), "--passes", str(flags.passes), "--threads", str(flags.threads)]
    command = [sys.executable, "-m", "outrider", "distill", *models, *data, *how]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(
            "There is no new draft. The same command goes on; more --minutes or --passes may help."
        )


def report(flags: argparse.Namespace) -> None:
    """Print acceptance by phase, and draw it."""
    events = Diary(flags.folder / "diary.jsonl").events
    print(f"{'phase':10}{'requests':>10}{'acceptance':>12}")
    for phase in ("code", "turned", "canary", "after"):
        found = [event for event in events if event.get("phase") == phase]
        steps = sum(event["steps"] for event in found)
        accepted = sum(event["accepted"] for event in found)
        print(f"{phase:10}{len(found):>10}{accepted / max(1, steps):>12.3f}")
    picture = flags.folder / "learning.svg"
    draw_learning(events, f"A draft learns: code turns into prose, T = {flags.temperature:g}", picture)
    print(picture)


def main() -> int:
    """Run what is left, and report."""
    parser = console.new_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "out/learning", help="for everything")
    parser.add_argument("--requests", type=int, default=300, help="of each kind of traffic, at least")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--answers", type=int, default=4, help="texts that the target writes after each collected prompt"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="longest training, after the writing")
    parser.add_argument("--passes", type=float, default=20.0, help="of the training over the data, at most")
    parser.add_argument("--threads", type=int, default=2, help="of the training")
    parser.add_argument("--target", type=Path, help="served in place of the widened one")
    flags = parser.parse_args()
    run(flags)
    report(flags)
    return 0


if __name__ == "__main__":
    console.run(main)
