"""The client's events as the page reads them: JSON, with no number that a browser would round. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.client import Chunk, Complete, Event, Started, Step


def event_json(event: Event) -> dict[str, Any]:
    """One event of a stream whose request asked for its steps."""
    match event:
        case Started():
            return {
                "type": "started",
                "seed": str(event.seed),
                **_some(event, "request_id", "model", "prompt_tokens", "cached_tokens"),
            }
        case Chunk():
            return {
                "type": "chunk",
                "text": event.text,
                "token_ids": event.token_ids,
                "origins": event.origins,
                "step": None if event.step is None else _step(event.step),
            }
        case Complete():
            return {
                "type": "complete",
                "finish_reason": event.finish_reason,
                "usage": asdict(event.usage),
                "speculation": event.speculation,
                "resumptions": event.resumptions,
            }


def _step(step: Step) -> dict[str, Any]:
    bonus = None if step.bonus is None else {"id": step.bonus, "text": _text(step.bonus_spelling)}
    return {
        "number": step.number,
        "nodes": [
            {"id": node.token, "text": _text(node.spelling)} | _some(node, "parent", "origin", "accepted")
            for node in step.nodes
        ],
        "bonus": bonus,
        "timeline": [
            {"start_us": bar.start_ns // 1000}
            | _some(bar, "lane", "name", "duration_us", "nodes", "accepted")
            for bar in step.timeline
        ],
    }


def _some(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _text(spelling: bytes | None) -> str | None:
    return None if spelling is None else spelling.decode("utf-8", errors="replace")
