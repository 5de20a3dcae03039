"""`outrider distill`: a draft is trained on what its target writes.

Until the training is done, everything is in `<out>.partial`: the target's texts, the acceptance before
training, and a checkpoint. The same command resumes from there. `<out>` appears when the acceptance of the
trained draft is higher.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.bench.prompts import read_prompts
from outrider.cli.named_models import check_model
from outrider.cli.prompt_ids import check_prompts, token_ids_of
from outrider.cli.say import say
from outrider.process import stop_signals
from outrider.protocol.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider.collected import Collected
    from outrider.distill.acceptance import Acceptance
    from outrider.distill.models import Pair
    from outrider.distill.traffic import Window
    from outrider.distill.training import Progress
    from outrider.distill.writing import Prompt

FLAGS = "flags.json"
"""File in the folder of unfinished work that holds the flags with which the work was begun."""
TEXTS = "texts.jsonl"
"""File there with a copy of what was collected."""
SAY_SECONDS = 10.0
"""Seconds between lines of progress."""
MAY_CHANGE = ("passes", "minutes", "threads", "device")
"""Flags that may differ when a run is resumed."""


class Stopped(Exception):
    """The process was asked to stop."""


def distill(arguments: argparse.Namespace) -> int:
    """Train, measure and save; progress goes to standard error.

    Returns 1 when the acceptance did not rise, and 130 when it was stopped.

    Raises:
        OutriderError: the models or the texts cannot be used.
    """
    if arguments.task and not arguments.collected:
        raise ConfigError("--task: chooses among collected tokens; add --collected, or leave it out")
    arguments.answers = _answers(arguments)
    check_model("--target", arguments.target)
    check_model("--draft", arguments.draft)
    ids = _prompt_ids(arguments)
    out = Path(arguments.out)
    if out.exists():
        raise ConfigError(f"--out: {str(out)!r} exists; name a new folder")
    work = _work_folder(out, arguments)
    try:
        return _distill(arguments, ids, out, work)
    except Stopped:
        say(f"stopped; the same command goes on from {work}")
        return 130
    except (OutriderError, KeyboardInterrupt):
        if {path.name for path in work.iterdir()} <= {FLAGS, TEXTS}:  # there is nothing to resume
            shutil.rmtree(work)
        raise


def _prompt_ids(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """The prompts that the caller gives. They are read before the models are loaded, which takes long.

    Raises:
        ConfigError: they cannot be divided.
    """
    from outrider.distill.traffic import check_split

    if arguments.collected:
        return []
    ids = token_ids_of(read_prompts(arguments.prompts), arguments.target)
    check_split(ids, arguments.held_out)
    return ids


def _distill(arguments: argparse.Namespace, ids: list[tuple[int, ...]], out: Path, work: Path) -> int:
    from outrider.distill.acceptance import measure
    from outrider.distill.low_rank import check_rank
    from outrider.distill.models import load_pair, save_draft
    from outrider.distill.traffic import split, up_to, windows_of

    with _asked_to_stop() as stopped:
        pair = load_pair(
            arguments.target,
            arguments.draft,
            dtype=arguments.dtype,
            device=arguments.device,
            threads=arguments.threads,
        )
        if arguments.lora:
            check_rank(pair.draft, arguments.lora)
        learnt, held_out = split(_texts(arguments, ids, pair, work, stopped), arguments.held_out)
        say(f"{len(learnt)} texts to learn from, {len(held_out)} held out")
        judged = up_to(windows_of(held_out, arguments.window), arguments.held_out_tokens)
        before = _before(work, lambda: measure(pair, judged, arguments.temperature))
        trained = _train(arguments, pair, windows_of(learnt, arguments.window), work, stopped)
        after = _figures(measure(pair, judged, arguments.temperature))
        _print(before, after, sum(window.counted for window in judged), arguments.temperature)
        if after["acceptance"] <= before["acceptance"]:
            say(f"the acceptance did not rise, and nothing was saved; {work} can be removed")
            return 1
        save_draft(pair, out)
    (out / "distilled.json").write_text(
        json.dumps({"before": before, "after": after, **trained}, indent=1) + "\n"
    )
    shutil.rmtree(work)
    print("\n" + shlex.join(["outrider", "serve", "draft", "--model", str(out)]))
    return 0


def _train(
    arguments: argparse.Namespace, pair: Pair, windows: list[Window], work: Path, stopped: Any
) -> dict[str, float]:
    """Train to the end, from the checkpoint if there is one; returns what it took.

    Raises:
        Stopped: it was stopped; the checkpoint is written.
    """
    from outrider.distill.training import Plan, Training

    plan = Plan(arguments.passes, 60 * arguments.minutes, arguments.batch, arguments.rate, arguments.lora)
    training, checkpoint = Training(pair, windows, plan), work / "state.pt"
    if checkpoint.exists():
        training.load(checkpoint)
        say(f"going on at step {training.step} of {training.steps}")
    if not training.run(checkpoint, stopped, _ProgressPrinter()):
        raise Stopped
    return {"steps": training.step, "seconds": round(training.seconds, 1)}


def _work_folder(out: Path, arguments: argparse.Namespace) -> Path:
    """The folder of unfinished work. If it exists, the same flags must have made it.

    Raises:
        ConfigError: other flags made it.
    """
    work = out.with_name(out.name + ".partial")
    flags = {
        name: value
        for name, value in vars(arguments).items()
        if isinstance(value, str | int | float) and name not in MAY_CHANGE
    }
    known, text = work / FLAGS, json.dumps(flags)
    try:
        if not known.exists():
            work.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds prompts
            _write(known, text)
        elif known.read_text() != text:
            raise ConfigError(
                f"--out: {str(work)!r} was begun with other flags; remove it, or name another folder"
            )
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {str(work)!r} ({error.strerror})") from error
    return work


def _texts(
    arguments: argparse.Namespace, ids: list[tuple[int, ...]], pair: Pair, work: Path, stopped: Any
) -> list[Collected]:
    """What the target wrote, for its callers and for this training, after the prompts `ids`.

    Raises:
        ConfigError: nothing was collected, or there is nothing to write.
    """
    from outrider.distill.traffic import check_split, read_collected
    from outrider.distill.writing import Prompt, prompts_of

    collected: list[Collected] = []
    if arguments.collected:
        path = work / TEXTS
        if not path.exists():  # what is collected in the meantime waits for the next training
            _keep(arguments, pair, path)
        collected = read_collected(str(path), pair.vocabulary, pair.size).kept
        prompts = prompts_of(collected)
        check_split((prompt.tokens for prompt in prompts), arguments.held_out)
    else:
        check_prompts(ids, arguments.tokens, arguments.target, pair.size, pair.context_length)
        prompts = [Prompt(one) for one in ids]
    return collected + _written(arguments, pair, prompts * arguments.answers, work, stopped)


def _answers(arguments: argparse.Namespace) -> int:
    """Number of texts that the target writes after each prompt.

    Raises:
        ConfigError: it is 0 and nothing was collected, or it is more than 1 and all texts would be equal.
    """
    answers: int | None = arguments.answers
    if answers is None:
        return 0 if arguments.collected else 1
    if not answers and not arguments.collected:
        raise ConfigError("--answers: without --collected the target has to write; give 1 or more")
    if answers > 1 and not arguments.temperature:
        raise ConfigError(
            "--answers: all answers to a prompt are equal at temperature 0; give 1, or --temperature"
        )
    return answers


def _written(
    arguments: argparse.Namespace, pair: Pair, prompts: Sequence[Prompt], work: Path, stopped: Any
) -> list[Collected]:
    """What the target writes after the prompts, with progress.

    Raises:
        Stopped: it was stopped; the texts written so far are kept.
    """
    from outrider.distill.writing import write

    if not prompts:
        return []
    path = work / "written.jsonl"
    began, ready = time.monotonic(), len(path.read_text().splitlines()) if path.exists() else 0

    def tell(count: int) -> None:
        each = (time.monotonic() - began) / max(1, count - ready)
        left = _left(each * (len(prompts) - count))
        say(f"the target has written {count} of {len(prompts)} texts, {left}")
        if stopped():
            raise Stopped

    return write(pair, prompts, arguments.tokens, arguments.temperature, path, tell)


def _keep(arguments: argparse.Namespace, pair: Pair, path: Path) -> None:
    """Copy what was collected."""
    from outrider.distill.traffic import read_collected

    found = read_collected(arguments.collected, pair.vocabulary, pair.size, arguments.task)
    if found.others or found.broken:
        say(f"left out: {found.others} of another vocabulary or task, {found.broken} broken lines")
    _write(path, "".join(one.line() for one in found.kept))


def _write(path: Path, text: str) -> None:
    """Write a file, which appears only when it is complete."""
    making = path.with_suffix(".making")
    making.write_text(text)
    making.rename(path)


def _before(work: Path, measured: Any) -> dict[str, Any]:
    """The acceptance of the draft before training; measured only once."""
    path = work / "before.json"
    if not path.exists():
        _write(path, json.dumps(_figures(measured())))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _figures(found: Acceptance) -> dict[str, Any]:
    return {"acceptance": found.mean, "tasks": found.by_task()}


def _print(before: dict[str, Any], after: dict[str, Any], tokens: int, temperature: float) -> None:
    print(f"acceptance of {tokens:,} tokens held out, T = {temperature:g}\n{'':16}before   after")
    rows = [("all", before["acceptance"], after["acceptance"])]
    tasks = [(task or "none", before["tasks"][task], after["tasks"][task]) for task in before["tasks"]]
    for name, old, new in rows + (tasks if len(tasks) > 1 else []):
        print(f"{name:16}{old:6.3f}{new:8.3f}")


class _ProgressPrinter:
    """Prints the progress of a training every `SAY_SECONDS`."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        """One more step has been trained."""
        now = time.monotonic()
        if now < self._next and progress.step < progress.steps:
            return
        self._next = now + SAY_SECONDS
        say(
            f"step {progress.step} of {progress.steps}, divergence {progress.loss:.3f}, "
            f"{progress.tokens_per_second:,.0f} tokens/s, {_left(progress.seconds_left)}"
        )


@contextmanager
def _asked_to_stop() -> Iterator[Any]:
    """A function that says whether one of `stop_signals` came; a second one ends the process at once."""
    came: list[int] = []

    def receive(number: int, _frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        say("stopping after this step")

    before = {number: signal.signal(number, receive) for number in stop_signals()}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(seconds: float) -> str:
    return f"{seconds / 60:.1f} min left"
