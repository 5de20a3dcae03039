"""The prompts of a load: read from a file, or drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.cli.bench.target import Prompt
from outrider.cli.files import read_file
from outrider.client.conversation import Message
from outrider.protocol.errors import InvalidRequest, no_json

FLAG = "--prompts"
TEXT = (
    "the of and a to in is that for it as was with be by on not he his but at are this have from or had an "
    "they which one you were all her she there would their we him been has when who will no more if out so "
    "up said what its about than into them can only other time new some could these two may first then do"
)
"""Common words, each of which is one token in most vocabularies."""


class Labelled(NamedTuple):
    """A prompt, and the task, or kind of traffic, that it belongs to."""

    prompt: Prompt
    task: str = ""


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of `read_labelled`, without their tasks."""
    return [entry.prompt for entry in read_labelled(path)]


def read_labelled(path: str) -> list[Labelled]:
    """The prompts of a JSON list, or of the lines of a file named .jsonl.

    Each is a text, a list of token ids, a list of messages with role and content, or an object that has one
    of these as its `prompt` or `messages`, and perhaps a `task`.

    Raises:
        InvalidRequest: the file cannot be read, or an entry is none of these.
    """
    text = read_file(FLAG, path)
    try:
        lines = [line for line in text.split("\n") if line.strip()]  # a JSON text may hold other line ends
        found = [json.loads(line) for line in lines] if path.endswith(".jsonl") else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(FLAG, f"{path!r} is no JSON ({no_json(error)}); repair it") from error
    if not isinstance(found, list) or not found:
        raise InvalidRequest(FLAG, f"{path!r} must be a JSON list with a prompt, or be named .jsonl")
    return [Labelled(_prompt(number, entry), _task(number, entry)) for number, entry in enumerate(found, 1)]


def take(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, which repeat from the first on if there are too few."""
    return [prompts[index % len(prompts)] for index in range(count)]


def random_ids(
    count: int, length: int, vocabulary: int, avoid: Sequence[int], rng: random.Random
) -> list[Prompt]:
    """`count` prompts of `length` random token ids below `vocabulary`, without those in `avoid`."""
    tokens = [token for token in range(vocabulary) if token not in set(avoid)]
    return [tuple(rng.choices(tokens, k=length)) for _ in range(count)]


def random_words(count: int, length: int, rng: random.Random) -> list[Prompt]:
    """`count` texts of `length` common words, for servers that do not report their vocabulary."""
    words = TEXT.split()
    return [" ".join(rng.choices(words, k=length)) for _ in range(count)]


def conversation(prompt: Prompt) -> Prompt:
    """The prompt as what a user says to a chat model.

    Raises:
        InvalidRequest: the prompt is token ids.
    """
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    if isinstance(prompt[0], int):
        raise InvalidRequest("--chat", "takes texts or messages; leave it out for prompts of token ids")
    return prompt


def plain(prompt: Prompt) -> Prompt:
    """The prompt, for an endpoint that takes text and token ids.

    Raises:
        InvalidRequest: the prompt is a conversation.
    """
    if isinstance(prompt[0], Message):
        raise InvalidRequest(FLAG, "has messages; add --chat")
    return prompt


def _prompt(number: int, entry: Any) -> Prompt:
    if isinstance(entry, dict):
        entry = entry.get("prompt", entry.get("messages"))
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, list) and entry:
        if all(isinstance(part, int) and not isinstance(part, bool) for part in entry):
            return tuple(entry)
        if all(_is_message(part) for part in entry):
            return tuple(Message(part["role"], part["content"]) for part in entry)
    kinds = "a text, token ids, or messages with role and content as texts"
    raise InvalidRequest(FLAG, f"entry {number} must be {kinds}, and not be empty")


def _task(number: int, entry: Any) -> str:
    task = entry.get("task", "") if isinstance(entry, dict) else ""
    if not isinstance(task, str):
        raise InvalidRequest(FLAG, f"the task of entry {number} must be a text")
    return task


def _is_message(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name), str) for name in ("role", "content"))
