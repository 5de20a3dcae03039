"""`outrider generate` and `outrider timeline`: one request, its text, its figures, its picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from outrider.cli.client import Answer, run_request
from outrider.cli.timeline import Bar, from_trace, to_trace
from outrider.cli.timeline_picture import to_html, to_svg
from outrider.errors import InvalidRequest

WRITERS = (".html", ".svg", ".json")


def generate(arguments: argparse.Namespace) -> int:
    """Run one request and print it.

    Raises:
        OutriderError: the request failed; what came before it has been printed.
    """
    if arguments.timeline:
        _check_picture("--timeline", arguments.timeline)
    show = _discard if arguments.json else _print_now
    answer = asyncio.run(run_request(arguments, show, bool(arguments.timeline), _say))
    if arguments.json:
        print(json.dumps(to_json(answer)))
    elif sys.stdout.isatty():
        print()
    if arguments.stats or (arguments.stats is None and sys.stderr.isatty()):
        print(f"[{summary(answer)}]", file=sys.stderr)
    if arguments.timeline:
        _write(arguments.timeline, answer.timeline)
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    """Draw one request's steps.

    Raises:
        OutriderError: the request failed, or the saved one cannot be read.
    """
    _check_picture("--output", arguments.output)
    if arguments.from_json:
        bars = _read(arguments.from_json)
    else:
        answer = asyncio.run(run_request(arguments, _discard, record_timeline=True, say=_say))
        print(f"[{summary(answer)}]", file=sys.stderr)
        bars = answer.timeline
    _write(arguments.output, bars)
    return 0


def to_json(answer: Answer) -> dict[str, Any]:
    """What `--json` prints."""
    found: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "speculation": answer.speculation,
        "seed": answer.seed,
        "model": answer.model,
        "request_id": answer.request_id,
        "resumptions": answer.resumptions,
        "seconds": answer.seconds,
        "tokens_per_second": _rate(answer),
    }
    return found | ({"logprobs": answer.logprobs} if answer.logprobs else {})


def summary(answer: Answer) -> str:
    """One line about speed and speculation."""
    counts = answer.speculation
    tokens = len(answer.token_ids)
    parts = [f"{tokens} tokens in {answer.seconds:.2f} s, {_rate(answer):.1f} tokens/s"]
    if counts.get("first_token_micros"):
        parts.append(f"first after {counts['first_token_micros'] / 1000:.0f} ms")
    if counts.get("steps"):
        steps = counts["steps"]
        parts.append(f"{steps} steps of {counts['acceptance_length']:.2f} tokens")
        parts.append(f"hit rate {counts['hits'] / steps:.0%}")
    if counts.get("decode_micros"):
        parts.append(f"pipeline efficiency {counts['decode_busy_micros'] / counts['decode_micros']:.0%}")
    return "; ".join([*parts, f"seed {answer.seed}"])


def _rate(answer: Answer) -> float:
    """Tokens per second of the whole request, as its client saw it."""
    return len(answer.token_ids) / answer.seconds if answer.seconds > 0 else 0.0


def _print_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(sentence: str) -> None:
    """Beside the text; on a terminal on a line of its own."""
    begin = "\n" if sys.stdout.isatty() else ""
    print(f"{begin}outrider: {sentence}", file=sys.stderr, flush=True)


def _discard(_text: str) -> None:
    pass


def _check_picture(flag: str, path: str) -> None:
    """Before the request is sent, so that nothing is generated that cannot be drawn."""
    if Path(path).suffix not in WRITERS:
        raise InvalidRequest(flag, f"{path!r} must end in {', '.join(WRITERS)}")
    if not Path(path).parent.is_dir():
        raise InvalidRequest(flag, f"there is no folder {str(Path(path).parent)!r}")


def _read(path: str) -> list[Bar]:
    try:
        return from_trace(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidRequest("--from-json", f"cannot read {path!r} ({error})") from error


def _write(path: str, bars: list[Bar]) -> None:
    if not bars:
        raise InvalidRequest("timeline", "there are no steps to draw")
    suffix = Path(path).suffix
    content = (
        json.dumps(to_trace(bars)) if suffix == ".json" else (to_svg if suffix == ".svg" else to_html)(bars)
    )
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("output", f"cannot write {path!r} ({error.strerror})") from error
    print(f"wrote {path}", file=sys.stderr)
