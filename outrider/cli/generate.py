"""`outrider generate` and `outrider timeline`: run one request and show its text, figures or picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.cli.files import check_output, write_file
from outrider.cli.request import client_of, request_of
from outrider.cli.timeline.bars import to_trace
from outrider.cli.timeline.picture import to_html, to_svg
from outrider.client.request import Request
from outrider.client.results import Chunk, Collected, Generation, TimelineEvent, TokenLogprob
from outrider.client.retries import Retries
from outrider.client.survival import Broken, tokens_said
from outrider.protocol.errors import InvalidRequest

WRITERS: dict[str, Callable[[Sequence[TimelineEvent]], str]] = {
    ".html": to_html,
    ".svg": to_svg,
    ".json": lambda bars: json.dumps(to_trace(bars)),
}
RETRIES = Retries(begin=())
"""No retry before the text begins: a person at a terminal wants to know at once that nobody answers."""


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """One continuation, and how long the whole request took."""

    generation: Generation
    seconds: float


def generate(arguments: argparse.Namespace) -> int:
    """Run one request and print it.

    Raises:
        OutriderError: the request failed; the text that came before has been printed.
    """
    if arguments.logprobs is not None and not arguments.json:
        raise InvalidRequest("--logprobs", "needs --json, which prints them")
    show = _discard if arguments.json else _print_now
    answer = _answer(arguments, show, record_timeline=False)
    if arguments.json:
        print(json.dumps(to_json(answer)))
    elif sys.stdout.isatty():
        print()
    if arguments.stats or (arguments.stats is None and sys.stderr.isatty()):
        print(f"[{summary(answer)}]", file=sys.stderr)
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    """Draw one request's steps.

    Raises:
        OutriderError: the request failed, or the file cannot be written.
    """
    if Path(arguments.output).suffix not in WRITERS:
        raise InvalidRequest("--output", f"{arguments.output!r} must end in {', '.join(WRITERS)}")
    check_output("--output", arguments.output)
    answer = _answer(arguments, _discard, record_timeline=True)
    print(f"[{summary(answer)}]", file=sys.stderr)
    _write(arguments.output, answer.generation.end.timeline)
    return 0


def to_json(answer: TimedGeneration) -> dict[str, Any]:
    """What `--json` prints."""
    generation, end = answer.generation, answer.generation.end
    found: dict[str, Any] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": end.finish_reason,
        "usage": asdict(end.usage),
        "speculation": end.speculation,
        "seed": end.seed,
        "model": end.model,
        "request_id": end.request_id,
        "resumptions": end.resumptions,
        "seconds": answer.seconds,
        "tokens_per_second": _rate(answer),
    }
    logprobs = [_logprob(entry) for entry in generation.logprobs]
    return found | ({"logprobs": logprobs} if logprobs else {})


def summary(answer: TimedGeneration) -> str:
    """One line about speed and speculation."""
    counts = answer.generation.end.speculation
    tokens = len(answer.generation.token_ids)
    parts = [f"{tokens} tokens in {answer.seconds:.2f} s, {_rate(answer):.1f} tokens/s"]
    if counts.get("first_token_micros"):
        parts.append(f"first after {counts['first_token_micros'] / 1000:.0f} ms")
    if counts.get("steps"):
        steps = counts["steps"]
        parts.append(f"{steps} steps of {counts['acceptance_length']:.2f} tokens")
        parts.append(f"hit rate {counts['hits'] / steps:.0%}")
    usage = answer.generation.usage
    if predicted := usage.accepted_prediction_tokens + usage.rejected_prediction_tokens:
        parts.append(f"{usage.accepted_prediction_tokens} of {predicted} predicted tokens accepted")
    if counts.get("decode_micros"):
        parts.append(f"pipeline efficiency {counts['decode_busy_micros'] / counts['decode_micros']:.0%}")
    return "; ".join([*parts, f"seed {answer.generation.seed}"])


def _rate(answer: TimedGeneration) -> float:
    """Tokens per second of the whole request, as its client saw it."""
    return len(answer.generation.token_ids) / answer.seconds if answer.seconds > 0 else 0.0


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token": other.token, "logprob": other.logprob} for other in entry.top]
    return {"token": entry.token, "logprob": entry.logprob, "top": top}


def _answer(
    arguments: argparse.Namespace, show: Callable[[str], None], record_timeline: bool
) -> TimedGeneration:
    """Send the request that the flags describe; `show` is called with each piece of text as it arrives.

    Raises:
        OutriderError: what the orchestrator says, or `Unavailable` when it cannot be reached.
    """
    request = request_of(arguments, record_timeline)  # asyncio would not let Ctrl-C end the wait for a prompt
    return asyncio.run(_ask(arguments, request, show))


async def _ask(
    arguments: argparse.Namespace, request: Request, show: Callable[[str], None]
) -> TimedGeneration:
    collected, started = Collected(), time.perf_counter()
    client = client_of(arguments, arguments.token, RETRIES, _say_broken)
    async with client, aclosing(client.stream(request)) as events:
        async for event in events:
            collected.add(event)
            if isinstance(event, Chunk):
                show(event.text)
    return TimedGeneration(collected.result().generations[0], time.perf_counter() - started)


def _say_broken(broken: Broken) -> None:
    """Report a broken stream on standard error, on a terminal on a line of its own."""
    begin = "\n" if sys.stdout.isatty() else ""
    pause = f" in {broken.pause:.2g} s" if broken.pause else ""
    said = f"the stream broke after {tokens_said(broken.tokens)} ({broken.error}); resuming it{pause}"
    print(f"{begin}outrider: {said}", file=sys.stderr, flush=True)


def _print_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(_text: str) -> None:
    pass


def _write(path: str, bars: Sequence[TimelineEvent]) -> None:
    if not bars:
        raise InvalidRequest("timeline", "there are no steps to draw")
    write_file("--output", path, WRITERS[Path(path).suffix](bars))
    print(f"wrote {path}", file=sys.stderr)
