"""Streams that go on after `Last-Event-ID`: what an event's id says, and what need not be sent again. Pure.

The id has the seed, the number of characters sent of each choice, and the version of the model's weights.
From these any gateway generates the same text again and sends what follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming.requests import HttpRequest
from outrider.client import Chunk, Complete, Event, Started
from outrider.protocol.messages import SEEDS

HEADER = "last-event-id"
ID = re.compile(r"([0-9a-f]{1,16})((?:\.(?:-|[0-9]{1,9}e?)){1,16})(?:-([0-9A-Za-z_]{1,64}))?")
"""The seed; for each choice the number of characters sent, with `e` if its end was sent too, or `-` if it had
not begun; and the version of the weights if it is known."""
EVENTS = b"text/event-stream"


@dataclass(slots=True)
class _Choice:
    """How much of one choice the caller has."""

    sent: int = 0
    ended: bool = False
    begun: bool = False
    skip: int = 0
    """Characters that are generated again and not sent again."""

    @property
    def text(self) -> str:
        """This choice's part of an id."""
        return f"{self.sent}{'e' if self.ended else ''}" if self.begun else "-"


@dataclass(slots=True)
class StreamProgress:
    """How much of one stream of one prompt the caller has."""

    choices: list[_Choice]
    seed: int = 0
    """Seed of the first choice; each next choice has the next number."""
    version: str = ""
    """Version of the model's weights; empty when it is not known."""

    @classmethod
    def of(cls, request: HttpRequest) -> StreamProgress | None:
        """A stream at its beginning; None for requests whose streams have no ids.

        Such requests have several prompts, whose seeds differ; log probabilities, which belong to tokens and
        not to characters; or tools, whose calls are found in the whole text and have ids of their own.
        """
        if len(request.requests) > 1 or request.top_logprobs is not None or request.tools is not None:
            return None
        return cls([_Choice() for _ in range(request.per_prompt)])

    @property
    def id(self) -> str:
        """Id of the event that is sent now."""
        sent = "".join(f".{one.text}" for one in self.choices)
        return f"{self.seed:x}{sent}" + (f"-{self.version}" if self.version else "")

    def left(self, event: Event) -> Event | None:
        """The part of an event that the caller does not have; None: it has the whole event."""
        choice = self.choices[event.index]
        match event:
            case Started():
                self.seed, self.version = (event.seed - event.index) % SEEDS, event.model_version
                known, choice.begun = choice.begun, True
                return None if known else event
            case Chunk():
                text = event.text[choice.skip :]
                choice.skip = max(0, choice.skip - len(event.text))
                choice.sent += len(text)
                return replace(event, text=text) if text else None
            case Complete():
                known, choice.ended = choice.ended, True
                return None if known else event


def wants_ids(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a stream's events get ids: its caller accepts server-sent events by name, or had ids before.

    Many clients of the API know only `data:` lines, and take an id for a broken answer.
    """
    return EVENTS in headers.get(b"accept", b"").lower() or HEADER.encode() in headers


def continued(request: HttpRequest, last: str) -> tuple[HttpRequest, StreamProgress | None]:
    """The request that generates the text again, and how much of it the caller has.

    `last` is the header's value; it is empty in a stream's first request.

    Raises:
        Problem: the id does not come from a gateway, or belongs to another kind of request.
    """
    progress = StreamProgress.of(request)
    if not last:
        return request, progress
    found = ID.fullmatch(last)
    if found is None or progress is None or not request.stream:
        raise wrong(HEADER, "must be the id of an event of this stream; leave it out")
    counts = found[2].split(".")[1:]
    if len(counts) != len(progress.choices):
        raise wrong(HEADER, f"is of a stream of {len(counts)} choices, not {len(progress.choices)}")
    seed, version = int(found[1], 16), found[3] or ""
    known = [_known(count) for count in counts]
    repeated = replace(request.requests[0], seed=seed, model_version=version)
    return replace(request, requests=(repeated,)), StreamProgress(known, seed, version)


def _known(count: str) -> _Choice:
    if count == "-":
        return _Choice()
    sent = int(count.removesuffix("e"))
    return _Choice(sent, count.endswith("e"), begun=True, skip=sent)
