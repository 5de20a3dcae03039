"""Any server with an OpenAI-compatible API as a target, Outrider's gateway among them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from outrider.cli.bench.target import Ask, Delivered, Ended, Event, Sampling, Served
from outrider.client.conversation import Message
from outrider.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

TEXTS = ("content", "reasoning_content", "reasoning")
"""Fields that may hold the new text in a part of a chat's stream."""
GARBLED = (*(httpx2.HTTPError, TimeoutError, ValueError), *(AttributeError, IndexError, KeyError, TypeError))
"""Errors that are raised when an answer breaks off or is malformed."""
SHOWN = 300
"""Most characters of an error's text that are passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings:
    """How a server is asked."""

    url: str
    chat: bool
    """Whether requests go to /chat/completions instead of /completions."""
    seconds: float
    """Longest time for one request."""
    sampling: Sampling
    extra: Mapping[str, Any]
    """More fields of the body; null removes a field."""


@dataclass(slots=True)
class _Answer:
    """What the parts of a stream have said so far."""

    usage: Mapping[str, Any] | None = None
    finish_reason: str = ""

    def take(self, part: Any) -> bool:
        """Record a part of the stream; returns whether it has new text.

        Raises:
            Unavailable: the part is an error.
        """
        if part.get("error"):
            raise Unavailable(f"the stream ended with an error: {_message(part)}")
        self.usage = part.get("usage") or self.usage
        choices = part.get("choices")
        if not choices:
            return False
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        delta = choices[0].get("delta") or {}
        return bool(choices[0].get("text") or any(delta.get(name) for name in TEXTS))

    def ended(self) -> Ended:
        """The end of the answer.

        Raises:
            Unavailable: the server did not count the tokens.
        """
        if self.usage is None:
            raise Unavailable(
                "the stream ended without usage; stream_options.include_usage must be supported"
            )
        return Ended(
            input_tokens=self.usage.get("prompt_tokens", 0),
            output_tokens=self.usage.get("completion_tokens", 0),
            cached_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            finish_reason=self.finish_reason,
        )


class OpenAiTarget:
    """A server with the OpenAI API over HTTP."""

    def __init__(self, http: httpx2.AsyncClient, settings: OpenAiSettings, model: str) -> None:
        self.served = Served(address=settings.url, model=model)
        self._http = http
        self._settings = settings
        self._path = "/chat/completions" if settings.chat else "/completions"

    @classmethod
    async def reach(cls, http: httpx2.AsyncClient, settings: OpenAiSettings, model: str) -> OpenAiTarget:
        """A target for the server; an empty `model` stands for the first that the server lists.

        Raises:
            OutriderError: the server cannot be reached, or lists no model.
        """
        if model:
            return cls(http, settings, model)
        try:
            async with asyncio.timeout(settings.seconds):
                response = await http.get("/models")
            await _check(response)
            return cls(http, settings, response.json()["data"][0]["id"])
        except GARBLED as error:
            raise _explained(
                error, settings, "GET /models failed; give an HTTP port, not gRPC's, or try --model NAME"
            ) from error

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """See `BenchTarget`."""
        answer = _Answer()
        try:
            async with (
                asyncio.timeout(self._settings.seconds),
                self._http.stream("POST", self._path, json=self._body(ask)) as response,
            ):
                await _check(response)
                async for line in lines(response):
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]" and answer.take(json.loads(data)):
                        yield Delivered()
        except GARBLED as error:
            raise _explained(error, self._settings, "the answer broke") from error
        yield answer.ended()

    def _body(self, ask: Ask) -> dict[str, Any]:
        settings, sampling = self._settings, self._settings.sampling
        body = {
            "model": self.served.model,
            **({"messages": _messages(ask)} if settings.chat else {"prompt": ask.prompt}),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": ask.seed,
            "ignore_eos": sampling.ignore_eos or None,
            **settings.extra,
        }
        return {name: value for name, value in body.items() if value is not None}


async def lines(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Whole lines as they arrive; httpx's own method also ends lines at U+2028, which a text may contain."""
    rest = b""
    async for piece in response.aiter_raw():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line


def _messages(ask: Ask) -> list[dict[str, Any]]:
    return [
        {"role": message.role, "content": message.content}
        for message in ask.prompt
        if isinstance(message, Message)
    ]


async def _check(response: httpx2.Response) -> None:
    """Raise the error that a refusal stands for."""
    if response.status_code != 200:
        await response.aread()
        raise refusal(response.status_code, response.text, str(response.url))


def refusal(status: int, text: str, url: str) -> OutriderError:
    """The error that an HTTP status and its body stand for."""
    try:
        said = _message(json.loads(text))
    except ValueError:
        said = text.strip()[:SHOWN]
    sentence = f"HTTP {status}: {said}" if said else f"HTTP {status}"
    match status:
        case 401 | 403:
            return Unauthenticated(f"{sentence}; set OPENAI_API_KEY or --token")
        case 404:
            return InvalidRequest(url, f"{sentence}; check the address, most end in /v1, and --model")
        case 429:
            return Overloaded(sentence)
        case _ if 300 <= status < 500:
            return InvalidRequest(url, sentence)
        case _:
            return Unavailable(sentence)


def _message(body: Any) -> str:
    """The error message in a body, in the format of any server."""
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:SHOWN]


def _explained(error: Exception, settings: OpenAiSettings, what: str) -> OutriderError:
    match error:
        case TimeoutError():
            return DeadlineExceeded(f"no end of the answer within {settings.seconds:g} s")
        case httpx2.ConnectError():
            return Unavailable(f"cannot reach {settings.url} ({error})")
        case _:
            return Unavailable(f"{what} ({type(error).__name__}: {error})")
