"""The queue of long prompts, before a scripted process and before the real one."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.text import jobs, tokenizing_worker
from orchestrator.text.conversation import ChatMessage, Conversation, Tool, ToolCall
from orchestrator.text.jobs import ChatPrompt, Ids, Job, TextPrompt
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizer_process import TokenizerProcess
from orchestrator.text.tokenizing import MAX_WAITING, Tokenizing
from outrider.protocol.errors import ContextTooLong, InvalidRequest, OutriderError, Overloaded, Unavailable
from tests.unit.orchestrator.rig import no_more_files, runs, until
from tests.unit.orchestrator.text.test_text_stream import BYTE_LEVEL
from tests.unit.orchestrator.text.test_tokenizer import TEMPLATE, tokenizer

POSITIONS = 2048
LARGEST = 1000
"""Bytes that may wait."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


FULL = Conversation(
    messages=(
        ChatMessage("user", ("a", "b"), name="ann"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "add", "{}"),)),
        ChatMessage("tool", "3", tool_call_id="c1"),
    ),
    tools=(Tool("add", "Adds.", '{"type": "object"}'),),
    template_kwargs='{"brief": true}',
    generation_prompt=False,
)
"""With all that a conversation can have."""


@pytest.fixture(autouse=True)
def nothing_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the shortest text goes to the process."""
    monkeypatch.setattr(jobs, "INLINE_BYTES", -1)


def chat(*contents: str) -> ChatPrompt:
    """A conversation."""
    return ChatPrompt(Conversation(messages=tuple(ChatMessage("user", each) for each in contents)))


class Scripted:
    """A process that answers when it is let, in the order it was asked."""

    def __init__(self) -> None:
        self.starts: list[TextTokenizer] = []
        self.asked: list[Any] = []
        self.ended = 0
        self.go = asyncio.Event()
        self.answers: list[tuple[str, Any] | None] = []
        """What the next answers are instead of one token, the length of the prompt."""
        self.status = -9
        self.leaving = False

    async def start(self, tokenizer: TextTokenizer) -> Scripted:
        """Of `Tokenizing`."""
        self.starts.append(tokenizer)
        self.tokenizer = tokenizer
        return self

    async def ask(self, job: Job, positions: int) -> tuple[str, Any] | None:
        """Of `Worker`."""
        self.asked.append(job.text if isinstance(job, TextPrompt) else job)
        await self.go.wait()
        if self.answers:
            return self.answers.pop(0)
        return "tokens", array("I", [job.size]).tobytes()

    async def end(self) -> int:
        """Of `Worker`."""
        self.ended += 1
        return self.status


class Waiting:
    """Requests before a scripted process, by the text they came with."""

    def __init__(self, process: Scripted) -> None:
        self.process = process
        self.tokenizing = Tokenizing(LARGEST, process.start)
        self.tasks: list[asyncio.Task[tuple[int, ...]]] = []

    async def send(self, *contents: str, served: TextTokenizer = BYTE_LEVEL) -> None:
        """One request after another; returns when each has its place, or its refusal."""
        for content in contents:
            coroutine = self.tokenizing.tokens(TextPrompt(content), served, POSITIONS)
            self.tasks.append(asyncio.create_task(coroutine))
            await asyncio.sleep(0)
        await until(lambda: bool(self.process.asked))

    async def outcomes(self) -> list[Any]:
        """What became of each."""
        return await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_the_shortest_goes_first() -> None:
    """One is worked on; of those that wait the shortest is next, of equals the one that came first."""
    process = Scripted()
    waiting = Waiting(process)
    await waiting.send("first", "long" * 9, "c", "bb", "d")
    process.go.set()
    assert await waiting.outcomes() == [(5,), (36,), (1,), (2,), (1,)]
    assert process.asked == ["first", "c", "d", "bb", "long" * 9]
    assert (len(process.starts), waiting.tokenizing.waiting) == (1, 0)


async def test_equal_texts_are_done_once() -> None:
    """Requests with one constraint that come at once wait for one check, also where it is refused."""
    waiting = Waiting(process := Scripted())
    process.answers = [("tokens", b""), ("refused", ("text", "is wrong"))]
    await waiting.send("first", *(["all the same"] * 8))
    process.go.set()
    _, *rest = await waiting.outcomes()
    assert process.asked == ["first", "all the same"]
    assert [str(each) for each in rest] == ["text: is wrong"] * 8
    assert waiting.tokenizing.waiting == 0


async def test_what_waits_is_bounded_in_bytes() -> None:
    """Beyond the bound a request is refused at once; alone, one of any size is taken; room comes back."""
    process = Scripted()
    waiting = Waiting(process)
    await waiting.send("x" * LARGEST * 2, "y")
    process.go.set()
    large, refused = await waiting.outcomes()
    assert large == (LARGEST * 2,)
    assert isinstance(refused, Overloaded)
    await waiting.send("z" * LARGEST)
    assert (await waiting.outcomes())[-1] == (LARGEST,)


async def test_what_waits_is_bounded_in_number() -> None:
    """However small they are."""
    process = Scripted()
    waiting = Waiting(process)
    await waiting.send(*["x"] * (MAX_WAITING + 2))
    process.go.set()
    outcomes = await waiting.outcomes()
    assert outcomes[:MAX_WAITING] == [(1,)] * MAX_WAITING
    assert [type(outcome) for outcome in outcomes[MAX_WAITING:]] == [Overloaded] * 2


async def test_a_caller_that_goes_gives_its_place_back() -> None:
    """Its prompt is never worked on, and another may wait instead."""
    process = Scripted()
    waiting = Waiting(process)
    await waiting.send("first", "y" * (LARGEST - 5))
    waiting.tasks[1].cancel()
    await asyncio.wait({waiting.tasks[1]})
    await waiting.send("z" * (LARGEST - 5))
    process.go.set()
    outcomes = await waiting.outcomes()
    assert (outcomes[0], outcomes[2]) == ((5,), (LARGEST - 5,))
    assert process.asked == ["first", "z" * (LARGEST - 5)]


async def test_a_prompt_is_tried_again_when_the_process_has_ended() -> None:
    """Once, by a new one; then the caller hears of it, and the next prompt is served."""
    process = Scripted()
    process.answers = [None]
    waiting = Waiting(process)
    process.go.set()
    await waiting.send("once")
    assert await waiting.outcomes() == [(4,)]
    process.answers = [None, None]
    await waiting.send("twice", "next one")
    outcomes = await waiting.outcomes()
    assert isinstance(outcomes[1], Unavailable)
    assert outcomes[2] == (8,)
    assert (len(process.starts), process.ended) == (4, 3)


@pytest.mark.parametrize(
    ("answer", "status", "error", "named"),
    [
        (None, -signal.SIGPROF, InvalidRequest, "text"),
        (None, -signal.SIGABRT, InvalidRequest, "text"),
        (("too_long", 3000), 0, ContextTooLong, "text"),
        (("refused", ("chat.messages", "no")), 0, InvalidRequest, "chat.messages"),
        (("nonsense", 1), 0, Unavailable, None),
        (("text", "a text"), 0, Unavailable, None),
        (("tokens", b"abc"), 0, OutriderError, None),
    ],
)
async def test_bad_ends_name_the_field(
    answer: tuple[str, Any] | None, status: int, error: type[OutriderError], named: str | None
) -> None:
    """Over its bounds, too many tokens, refused by the template: the caller is told what to change."""
    process = Scripted()
    process.answers, process.status = [answer], status
    waiting = Waiting(process)
    process.go.set()
    await waiting.send("prompt")
    [outcome] = await waiting.outcomes()
    assert isinstance(outcome, error)
    assert outcome.field == named
    assert len(process.asked) == 1, "not tried again"


async def test_another_tokenizer_takes_another_process() -> None:
    """When another model is served, and when a process says that it leaves."""
    process, other = Scripted(), tokenizer()
    waiting = Waiting(process)
    process.go.set()
    await waiting.send("a")
    await waiting.outcomes()
    process.leaving = True
    await waiting.send("b", served=other)
    await waiting.outcomes()
    process.leaving = False
    await waiting.send("c", served=other)
    await waiting.outcomes()
    assert process.starts == [BYTE_LEVEL, other, other]


async def test_at_the_end_nobody_waits_on() -> None:
    """Those in the queue and the one that is worked on get a status; the process is ended."""
    process = Scripted()
    waiting = Waiting(process)
    await waiting.send("first", "second")
    await waiting.tokenizing.close()
    assert [type(outcome) for outcome in await waiting.outcomes()] == [Unavailable] * 2
    assert process.ended == 1


def test_sizes_count_bytes_and_messages() -> None:
    """A template runs for each message, however short."""
    assert TextPrompt("é").size == 2
    assert chat("é", "").size == 2 * 64 + 2
    texts = 'abannc1add{}3c1addAdds.{"type": "object"}{"brief": true}'
    assert ChatPrompt(FULL).size == (3 + 2 + 1 + 1) * 64 + len(texts)
    assert Ids((1, 2)).size == 8


def test_json_is_never_rendered_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short: a template may indent what is nested, and write far more than it was given."""
    monkeypatch.undo()
    message = ChatMessage("user", "hi")
    plain = Conversation(messages=(message,))
    calling = ChatMessage("assistant", tool_calls=(ToolCall("", "add", "{}"),))
    assert ChatPrompt(plain).is_quick
    assert not ChatPrompt(replace(plain, tools=(Tool("add"),))).is_quick
    assert not ChatPrompt(replace(plain, template_kwargs="{}")).is_quick
    assert not ChatPrompt(replace(plain, messages=(message, calling))).is_quick
    assert not ChatPrompt(replace(plain, messages=(ChatMessage("user", "x" * 5000),))).is_quick


@pytest.mark.parametrize("job", [TextPrompt("é", False), ChatPrompt(FULL, True), Ids((1, 2), True)])
def test_jobs_are_the_same_on_the_other_side(job: Job) -> None:
    """With all that is in them."""
    assert pickle.loads(pickle.dumps(job)) == job


async def test_an_answer_of_another_kind_is_refused() -> None:
    """Token ids where a text was asked for."""
    process = Scripted()
    process.go.set()
    with pytest.raises(Unavailable):
        await Tokenizing(LARGEST, process.start).text(Ids((1,)), BYTE_LEVEL, POSITIONS)


@asynccontextmanager
async def real() -> AsyncIterator[Tokenizing]:
    """One with the real process."""
    tokenizing = Tokenizing(1 << 20)
    try:
        yield tokenizing
    finally:
        await tokenizing.close()


async def test_the_process_says_what_the_tokenizer_says() -> None:
    """Text and conversations, the beginning-of-sequence token and refusals too."""
    served = tokenizer(TEMPLATE, bos=True)
    async with real() as tokenizing:
        for content in ("hello 👍 " * 150, "x", ""):
            tokens = await tokenizing.tokens(TextPrompt(content), served, POSITIONS)
            assert tokens == served.encode(content)
            bare = await tokenizing.tokens(TextPrompt(content, special_tokens=False), served, POSITIONS)
            assert bare == tokens[1:]
            assert await tokenizing.text(Ids(tokens), served, POSITIONS) == content
            assert await tokenizing.text(Ids(tokens, True), served, POSITIONS) == f"<s>{content}"
        conversation = chat("hi", "you there")
        tokens = await tokenizing.tokens(conversation, served, POSITIONS)
        assert tokens == served.encode_chat(conversation.chat)
        with pytest.raises(ContextTooLong):
            await tokenizing.tokens(TextPrompt("x" * (POSITIONS + 1)), served, POSITIONS)
        longer = "x" * (POSITIONS + 1)
        assert len(await tokenizing.tokens(TextPrompt(longer), served, 2 * POSITIONS)) == POSITIONS + 2
        with pytest.raises(InvalidRequest) as caught:
            await tokenizing.tokens(chat(), served, POSITIONS)
        assert caught.value.field == "chat.messages"


@pytest.mark.parametrize("spare", [0, 3])
async def test_without_room_for_a_process_prompts_are_refused(spare: int) -> None:
    """For want of file descriptors, at the first and at a later step of its start; the next one is served."""
    async with real() as tokenizing:
        with no_more_files(spare), pytest.raises(Unavailable, match="Too many open files"):
            await tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS)
        assert await tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS)


async def test_a_killed_process_loses_nothing() -> None:
    """Killed between two prompts and in the middle of one: both are answered."""
    async with real() as tokenizing:
        await tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS)
        process = tokenizing._worker
        assert isinstance(process, TokenizerProcess)
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        assert await waiting == BYTE_LEVEL.encode("hello")
        again = tokenizing._worker
        assert isinstance(again, TokenizerProcess)
        assert again.pid != process.pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_works_on_while_its_orchestrator_drains(number: int) -> None:
    """Supervisors that end a group of processes signal this one too."""
    async with real() as tokenizing:
        await tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS)
        process = tokenizing._worker
        assert isinstance(process, TokenizerProcess)
        os.kill(process.pid, number)
        await tokenizing.tokens(TextPrompt("hello"), BYTE_LEVEL, POSITIONS)
        assert tokenizing._worker is process


def test_a_template_without_end_is_ended() -> None:
    """By the kernel, after the processor time that a prompt may take."""
    program = (
        "import sys, orchestrator.text.tokenizing_worker as worker\n"
        "worker.BASE_SECONDS = 0.2\n"
        "worker.serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
    files = tokenizer(ENDLESS).files
    frames = b"".join(
        tokenizing_worker.frame(pickle.dumps(sent)) for sent in (files, (chat("hi"), POSITIONS))
    )
    done = subprocess.run([sys.executable, "-c", program], input=frames, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGPROF


async def test_the_process_ends_with_its_orchestrator() -> None:
    """However that ends: the end of its input is the end of it."""
    program = (
        "import asyncio, os, signal\n"
        "from orchestrator.text.tokenizer_process import TokenizerProcess\n"
        "from orchestrator.text.jobs import TextPrompt\n"
        "from tests.unit.orchestrator.text.test_text_stream import BYTE_LEVEL\n"
        "async def main():\n"
        "    process = await TokenizerProcess.start(BYTE_LEVEL)\n"
        "    await process.ask(TextPrompt('hello'), 2048)\n"
        "    print(process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    started = [sys.executable, "-c", program]
    done = await asyncio.to_thread(subprocess.run, started, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    await until(lambda: not runs(int(done.stdout)))


def test_of_a_text_without_end_the_beginning_is_tokenized() -> None:
    """Time and memory go by the context: a megabyte costs a few positions; what fits is tokenized whole."""
    assert len(BYTE_LEVEL.encode("x" * 1_000_000, 10)) < 200
    runs = "hell" * 1000
    assert BYTE_LEVEL.encode(runs, 1000) == BYTE_LEVEL.encode(runs)
    assert len(BYTE_LEVEL.encode(runs, 100)) > 100
