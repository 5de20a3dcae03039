"""Prompts of files and random ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.bench import prompts
from outrider.client.conversation import Message
from outrider.protocol.errors import InvalidRequest

HELLO = [{"role": "user", "content": "hello"}]


def test_a_list_of_all_kinds(tmp_path: Path) -> None:
    """Texts, token ids, conversations, and objects that hold one of them."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["x = ", [1, 2], HELLO, {"prompt": "y"}, {"messages": HELLO}]))
    conversation = (Message("user", "hello"),)
    assert prompts.read_prompts(str(path)) == ["x = ", (1, 2), conversation, "y", conversation]


def test_lines(tmp_path: Path) -> None:
    """A file named .jsonl has an entry per line; empty ones are nothing."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"x = "\n\n[1, 2]\n{"prompt": "y", "more": 1}\n')
    assert prompts.read_prompts(str(path)) == ["x = ", (1, 2), "y"]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    """A JSON text may hold the other characters at which Python splits lines, such as U+2028."""
    path, text = tmp_path / "prompts.jsonl", "one\u2028two\x85three"
    path.write_text(f"{json.dumps(text, ensure_ascii=False)}\r\n[1, 2]\n", encoding="utf-8")
    assert prompts.read_prompts(str(path)) == [text, (1, 2)]


def test_prompts_may_have_a_task(tmp_path: Path) -> None:
    """Those that are objects; it is a text."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "task": "code"}\n"y"\n')
    assert prompts.read_labelled(str(path)) == [("x", "code"), ("y", "")]
    path.write_text('{"prompt": "x", "task": 3}\n')
    with pytest.raises(InvalidRequest, match="the task of entry 1 must be a text"):
        prompts.read_prompts(str(path))


@pytest.mark.parametrize("entry", [1, "", [], [1, "a"], [True], {"text": "x"}, [{"role": "user"}], None])
def test_an_entry_of_another_kind_is_named(tmp_path: Path, entry: Any) -> None:
    """By its number, with what it must be."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["x", entry]))
    with pytest.raises(InvalidRequest, match="--prompts: entry 2 must be a text, token ids, or messages"):
        prompts.read_prompts(str(path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    """As is one that is not there."""
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="--prompts"):
        prompts.read_prompts(str(path))
    with pytest.raises(InvalidRequest, match="cannot read"):
        prompts.read_prompts(str(tmp_path / "none.json"))


def test_prompts_go_round() -> None:
    """More requests than prompts begin again."""
    assert prompts.take(["a", "b"], 5) == ["a", "b", "a", "b", "a"]


def test_random_prompts_have_their_lengths() -> None:
    """Ids of the vocabulary without those that end a text; or as many words. A seed gives them again."""
    ids = prompts.random_ids(2, 50, 4, [0, 3], random.Random(1))
    assert [len(prompt) for prompt in ids] == [50, 50]
    assert {token for prompt in ids for token in prompt} == {1, 2}
    words = prompts.random_words(1, 5, random.Random(1))
    assert [len(str(text).split()) for text in words] == [5]
    assert words == prompts.random_words(1, 5, random.Random(1))


def test_what_suits_an_endpoint() -> None:
    """Texts become a user's message for chat; ids cannot, nor messages be a plain prompt."""
    conversation = (Message("user", "hi"),)
    assert prompts.conversation("hi") == prompts.conversation(conversation) == conversation
    assert prompts.plain((1, 2)) == (1, 2)
    with pytest.raises(InvalidRequest, match="--chat: takes texts or messages"):
        prompts.conversation((1, 2))
    with pytest.raises(InvalidRequest, match="add --chat"):
        prompts.plain(conversation)
