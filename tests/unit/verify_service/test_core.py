"""Whole generations through the engine's core: the text never depends on what was proposed or when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from outrider.engine.runner import Segment
from outrider.protocol.errors import InternalError, OutOfPages, StaleHandle
from outrider.protocol.messages import FinishReason, Opened, SamplingParams, TokenBlock, Verdict, VerifyPolicy
from outrider.rpc.queues import Outbox
from tests.unit.verify_service.fakes import (
    LIMITS,
    STEP_SECONDS,
    Bench,
    Clock,
    FakeRunner,
    block,
    chain_block,
    events,
    greedy_text,
    opening,
    text,
    verdicts,
)
from verify_service.mailbox import Close, Closed, Open, VerifyStream
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.several_drafts import MAX_SILENCE

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11, 12, 1, 2), (3,)]
Proposer = Callable[[random.Random, int, list[int], list[int]], TokenBlock]


def perfect(draw: random.Random, first_id: int, committed: list[int], truth: list[int]) -> TokenBlock:
    """Exactly what the target will say."""
    return chain_block(first_id, len(committed), truth[len(committed) : len(committed) + 5])


def noise(draw: random.Random, first_id: int, committed: list[int], truth: list[int]) -> TokenBlock:
    """Random trees, with certainty."""
    parents = [draw.choice([-len(committed), first_id + draw.randrange(i + 1)]) for i in range(10)]
    return block(first_id, [(p, draw.randrange(13), 1.0) for p in parents], base=len(committed))


def hostile(draw: random.Random, first_id: int, committed: list[int], truth: list[int]) -> TokenBlock:
    """Wild parents, tokens, ids and lengths, with some truth in between."""
    nodes = [
        (
            draw.choice([-draw.randrange(1, 60), draw.randrange(60), -(2**62), 2**62]),
            draw.randrange(20),
            draw.random(),
        )
        for _ in range(draw.randrange(12))
    ]
    nodes += [(-len(committed), truth[len(committed)], 0.4)] if len(committed) < len(truth) else []
    return block(draw.choice([first_id, 2**62, 0]), nodes, ready=draw.random() < 0.5, base=draw.randrange(99))


def late(draw: random.Random, first_id: int, committed: list[int], truth: list[int]) -> TokenBlock:
    """Right continuations of a text that is some tokens behind."""
    start = max(1, len(committed) - draw.randrange(4))
    return chain_block(first_id, start, truth[start : start + 8])


def generate(
    bench: Bench, streams: dict[VerifyStream, list[int]], proposer: Proposer | None, seed: int = 0
) -> dict[VerifyStream, list[Verdict]]:
    """Run all streams to their end; `streams` has prompt and full text of each."""
    draw = random.Random(seed)
    received: dict[VerifyStream, list[Verdict]] = {stream: [] for stream in streams}
    first_id = 0
    for _ in range(5000):
        wait = bench.core.turn([])
        bench.clock.now += min(wait if wait is not None else 0.0, 0.005)
        for stream, truth in streams.items():
            received[stream] += verdicts(stream)
            session = bench.core.sessions.get(stream.id)
            if proposer is not None and session is not None and not session.finished and draw.random() < 0.8:
                bench.propose(stream, proposer(draw, first_id, session.tree.committed, truth))
                received[stream] += verdicts(stream)
                first_id += 20
        if all(done and done[-1].finish_reason for done in received.values()):
            return received
    raise AssertionError("the sessions do not end")


def open_all(bench: Bench, count: int, **changes: object) -> dict[VerifyStream, list[int]]:
    """A greedy session per prompt, with its full text."""
    streams = {}
    for prompt in PROMPTS:
        stream = bench.open(opening(prompt, sampling=SamplingParams(max_tokens=count), **changes))
        streams[stream] = [*prompt, *greedy_text(prompt, count)]
    return streams


@pytest.mark.parametrize("policy", list(VerifyPolicy))
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("proposer", [None, perfect, noise, hostile, late])
def test_proposals_never_change_the_text(
    proposer: Proposer | None, lookup: bool, policy: VerifyPolicy
) -> None:
    """Whatever a draft proposes, every session commits what the target says by itself."""
    bench = Bench()
    streams = open_all(bench, 30, lookup=lookup, policy=policy)
    received = generate(bench, streams, proposer)
    for stream, truth in streams.items():
        assert text(received[stream]) == truth[-30:]
        assert received[stream][-1].finish_reason is FinishReason.LENGTH
        assert isinstance(bench.close(stream), Closed)
    assert bench.core.statistics.used == 0


@pytest.mark.parametrize("proposer", [perfect, noise, hostile])
@pytest.mark.parametrize("pages", [9, 12, 20])
def test_scarce_pages_never_change_the_text(pages: int, proposer: Proposer) -> None:
    """Sessions are paused and computed anew, and nothing is lost."""
    bench = Bench(FakeRunner(num_pages=pages, page_size=4), max_step_tokens=8)
    streams = open_all(bench, 24)
    received = generate(bench, streams, proposer)
    for stream, truth in streams.items():
        assert text(received[stream]) == truth[-24:]
        bench.close(stream)
    bench.core.turn([])
    assert bench.core.statistics.used == 0


def test_a_perfect_draft_saves_steps_and_verdicts_say_so() -> None:
    """Five right tokens a block: six committed a step, all of them accepted but the bonus."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(max_tokens=25)))
    truth = [1, 2, 3, *greedy_text((1, 2, 3), 25)]
    received = generate(bench, {stream: truth}, perfect)[stream]
    assert len(received) < 12
    assert sum(verdict.accepted for verdict in received) >= 25 - len(received)
    assert all(len(v.tokens) == v.accepted + 1 for v in received[:-1])
    assert all(v.accepted <= v.depth <= v.verified for v in received)


def test_a_verdict_counts_what_happened() -> None:
    """Two of three nodes right, the bonus not in the tree; then a bonus that was, though not verified."""
    bench = Bench(limits=replace(LIMITS, max_nodes=3))
    bench.clock.now = 5.0
    truth = greedy_text((1, 2, 3), 9)
    stream = bench.open(opening((1, 2, 3), first_step=40))
    first = verdicts(stream)[0]
    assert (first.step, first.base_length, first.tokens, first.verified) == (41, 3, (truth[0],), 0)
    wrong = (truth[3] + 1) % 13
    bench.propose(stream, chain_block(0, 4, [truth[1], truth[2], wrong]))
    second = verdicts(stream)[0]
    assert (second.tokens, second.verified, second.accepted) == (tuple(truth[1:4]), 3, 2)
    assert (second.depth, second.hit, second.batch_size) == (3, False, 1)
    bench.propose(stream, chain_block(10, 7, truth[4:9]))
    third = verdicts(stream)[0]
    assert (third.verified, third.accepted, third.hit) == (3, 3, True)


def test_verdicts_tell_of_prompts_in_their_step() -> None:
    """Whosever they are; the last token of each brings one like any other session's."""
    bench = Bench(max_step_tokens=8)
    decoding = bench.open(opening((1, 2, 3)))
    assert [verdict.prompt_tokens for verdict in verdicts(decoding)] == [2]
    bench.open(opening(tuple(range(1, 11))))
    assert [verdict.prompt_tokens for verdict in verdicts(decoding)] == [7]


def test_times_are_split_into_queue_idle_forward_and_sample() -> None:
    """Queue runs from the verdict before; idle is the part of it in which no step ran."""
    clock = Clock()

    def compute(tokens: int) -> None:
        clock.now += 0.010

    bench = Bench(FakeRunner(on_forward=compute), clock=clock, max_step_tokens=1)
    first = bench.open(opening((1,)))
    clock.now += 0.004
    second = bench.open(opening((4,)))
    bench.core.turn([])
    clock.now += 0.001
    bench.core.turn([])
    times = [verdict.times for verdict in verdicts(first)]
    assert [time.queue_micros for time in times] == [0, 4_000, 11_000]
    assert [time.idle_micros for time in times] == [0, 4_000, 1_000]
    assert [time.forward_micros for time in times] == [10_000] * 3
    assert [v.times.queue_micros for v in verdicts(second)] == [10_000]


def test_a_slow_reader_stops_its_own_session_only() -> None:
    """No more than the bound is made for it; the others go on, and so does it when it reads."""
    bench = Bench(max_unread=3)
    slow, quick = bench.open(opening((1, 2, 3))), bench.open(opening((4, 5)))
    verdicts(quick)
    for _ in range(10):
        bench.core.turn([])
        assert len(verdicts(quick)) == 1
    assert slow.outbox.full
    assert len([e for e in events(slow) if isinstance(e, Verdict)]) == 2
    bench.core.turn([])
    assert len(verdicts(slow)) == 1


def test_closing_returns_pages_at_once() -> None:
    """In the turn that hears of it, whatever the session was doing, and the accounts are right."""
    bench = Bench(max_step_tokens=4)
    middle_of_prompt = bench.open(opening([1] * 30))
    decoding = bench.open(opening((4, 5)))
    for stream in (middle_of_prompt, decoding):
        assert bench.core.statistics.used > 0
        bench.close(stream)
    bench.core.turn([Close(decoding)])
    assert bench.core.statistics.used == 0


def test_a_quiet_engine_checks_its_accounts_and_sleeps() -> None:
    """A second after the last session; a page that nobody owns is an internal error."""
    bench = Bench()
    bench.close(bench.open(opening((1, 2, 3))))
    bench.clock.now += bench.core.turn([])
    assert bench.core.turn([]) is None
    bench.close(bench.open(opening((1, 2, 3))))
    bench.runner.pool.allocate(1)
    bench.clock.now += bench.core.turn([])
    with pytest.raises(InternalError):
        bench.core.turn([])


def test_a_kept_sequence_is_continued_without_computing_it_again() -> None:
    """Close with keep gives a handle; a session opened with it computes only what is new."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(max_tokens=10)))
    bench.run()
    said = text(verdicts(stream))
    handle = bench.close(stream, keep=True).handle
    assert handle.length == 3 + 9
    turn = (said[-1], 7, 8)
    bench.runner.steps.clear()
    again = bench.open(
        opening(turn, kv_handle=handle, prompt_length=15, sampling=SamplingParams(max_tokens=5))
    )
    assert isinstance(opened := events(again)[0], Opened)
    assert opened.cached_length == 12
    bench.run()
    assert bench.runner.steps[0] == [3]
    assert text(bench_verdicts := verdicts(again))[-4:] == greedy_text([1, 2, 3, *said, 7, 8], 5)[1:]
    assert bench_verdicts


@pytest.mark.parametrize(("max_tokens", "moving"), [(1, 0), (10, 1)])
def test_a_drain_waits_only_for_sequences_that_go_on(max_tokens: int, moving: int) -> None:
    """Nobody fetches those of a session that has ended, or of one that has computed nothing yet."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens)))
    bench.core.turn([Close(stream, keep=True, move=True)])
    new = VerifyStream(9, Outbox(bench.max_unread, lambda: None))
    bench.core.turn([Open(new, opening((4, 5))), Close(new, keep=True, move=True)])
    assert bench.core.moving == moving


def test_a_spent_handle_is_refused_and_harms_nobody() -> None:
    """The second taker hears that it is stale; the first goes on."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3)))
    handle = bench.close(stream, keep=True).handle
    first = bench.open(opening((5,), kv_handle=handle, prompt_length=4))
    second = bench.open(opening((5,), kv_handle=handle, prompt_length=4))
    assert isinstance(events(second)[0], StaleHandle)
    assert verdicts(first)


def test_leases_end_while_nothing_happens() -> None:
    """The engine asks to be woken for them and gives the pages back."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3)))
    bench.close(stream, keep=True)
    assert bench.core.statistics.used > 0
    bench.clock.now += bench.core.turn([]) + 60.0
    assert bench.core.turn([]) is None
    assert bench.core.statistics.used == 0


def test_leases_end_while_another_session_runs() -> None:
    """A replica that is never idle gives their pages back too."""
    bench = Bench()
    bench.close(bench.open(opening((1, 2, 3))), keep=True)
    bench.open(opening((4, 5), sampling=SamplingParams(max_tokens=8)))
    bench.clock.now += 61.0
    assert bench.core.turn([]) == 0.0
    assert len(bench.core.handles) == 0


def test_kept_sequences_give_way_to_sessions() -> None:
    """A lease is a favour: its pages go to a session that needs them."""
    bench = Bench(FakeRunner(num_pages=6, page_size=4))
    kept = bench.open(opening([1] * 15))
    bench.close(kept, keep=True)
    stream = bench.open(opening([2] * 15, sampling=SamplingParams(max_tokens=8)))
    bench.run()
    assert len(text(verdicts(stream))) == 8
    assert len(bench.core.handles) == 0


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    """With the numbers, and without touching anything."""
    bench = Bench(FakeRunner(num_pages=4, page_size=4))
    stream = bench.open(opening([1] * 17))
    assert isinstance(error := events(stream)[0], OutOfPages)
    assert "5 KV pages" in str(error)
    assert bench.core.sessions == {}


def test_what_outgrows_the_memory_is_ended() -> None:
    """It commits all that fits and then gets OutOfPages."""
    bench = Bench(FakeRunner(num_pages=4, page_size=4))
    stream = bench.open(opening((1, 2, 3)))
    bench.run()
    received = events(stream)
    assert isinstance(received[-1], OutOfPages)
    assert text(received[1:-1]) == greedy_text((1, 2, 3), 14)
    assert bench.core.statistics.used == 0


def test_the_most_senior_session_is_never_paused() -> None:
    """Priority counts before age: the younger session with the higher priority runs through."""
    bench = Bench(FakeRunner(num_pages=8, page_size=4))
    low = bench.open(opening((4, 5), sampling=SamplingParams(max_tokens=26)))
    high = bench.open(opening((1, 2, 3), priority=5, sampling=SamplingParams(max_tokens=26)))
    order = []
    while bench.core.sessions and len(order) < 2:
        bench.core.turn([])
        for stream in (low, high):
            if any(verdict.finish_reason for verdict in verdicts(stream)):
                order.append(stream)
                bench.close(stream)
    assert order == [high, low]


def test_a_session_that_waits_holds_up_nobody() -> None:
    """A sequential session waits for its block while another one steps."""
    bench = Bench()
    waiting = bench.open(opening((1, 2, 3), policy=VerifyPolicy.SEQUENTIAL))
    running = bench.open(opening((4, 5)))
    events(waiting)
    for _ in range(5):
        assert bench.core.turn([]) == 0.0
    assert len(verdicts(running)) == 6
    assert verdicts(waiting) == []


def test_sequential_sessions_start_with_a_ready_block_or_when_none_comes() -> None:
    """A block that is not ready does not start a step; patience running out does."""
    bench = Bench()
    stream = bench.open(opening((1, 2, 3), policy=VerifyPolicy.SEQUENTIAL))
    truth = greedy_text((1, 2, 3), 9)
    verdicts(stream)
    wait = bench.propose(stream, chain_block(0, 4, truth[1:3], ready=False))
    assert wait == pytest.approx(0.25) or wait == pytest.approx(2.0)
    assert verdicts(stream) == []
    bench.propose(stream, block(2, [(1, truth[3], 0.9)], ready=True, base=4))
    assert verdicts(stream)[0].accepted == 3
    bench.clock.now += bench.core.turn([])
    bench.core.turn([])
    assert verdicts(stream)[0].verified == 0


def test_nodes_that_do_not_pay_are_not_verified() -> None:
    """Where every token costs as much as a step, a session runs as without speculation."""
    bench = Bench(cost=CostModel([1, 64], [1.0, 64.0], 64))
    bench.core._controller.cost.observe = lambda *_: None
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(max_tokens=9)))
    truth = [1, 2, 3, *greedy_text((1, 2, 3), 9)]
    received = generate(bench, {stream: truth}, perfect)[stream]
    assert [verdict.verified for verdict in received] == [0] * 9


def test_lookup_finds_repetitions_without_a_draft() -> None:
    """A text that repeats itself is committed several tokens at a time."""

    class Repeating(FakeRunner):
        def forward(self, segments):
            logits = super().forward(segments)
            rows = [s.tokens[i] for s in segments for i in s.wanted]
            for row, token in zip(logits, rows, strict=True):
                row[(token + 1) % 5] = 50.0
            return logits

    bench = Bench(Repeating())
    stream = bench.open(opening((0, 1, 2), lookup=True, sampling=SamplingParams(max_tokens=40)))
    bench.run()
    received = verdicts(stream)
    assert text(received) == [(3 + i) % 5 for i in range(40)]
    assert len(received) < 25
    assert sum(verdict.lookup_verified for verdict in received) > 10


def test_log_probabilities_come_one_per_token() -> None:
    """Also for accepted nodes, and of the committed tokens."""
    bench = Bench()
    truth = greedy_text((1, 2, 3), 9)
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(logprobs=2)))
    verdicts(stream)
    bench.propose(stream, chain_block(0, 4, truth[1:4]))
    verdict = verdicts(stream)[0]
    assert [entry.token for entry in verdict.logprobs] == list(verdict.tokens) == truth[1:5]
    assert all(
        entry.top[0] == (entry.token, entry.logprob) and len(entry.top) == 2 for entry in verdict.logprobs
    )


def test_a_step_knows_whether_drafts_are_at_work() -> None:
    """They are while blocks come, and until they have been missing for some steps: then their cores help."""
    bench = Bench(runner := FakeRunner())
    stream = bench.open(opening())
    bench.clock.now += STEP_SECONDS
    bench.propose(stream, block(0, [(-4, 5, 1.0)], base=4))
    for _ in range(MAX_SILENCE):
        bench.clock.now += 1.0  # no step waits for the next block any more
        bench.core.turn([])
    assert runner.drafts_at_work == [False, *[True] * MAX_SILENCE, False]


class SickRunner(FakeRunner):
    """Gives no numbers behind a certain token."""

    sick = 12

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits of the wanted entries; NaN behind the sick token."""
        rows = super().forward(segments)
        wanted = [segment.kv.scratch_tokens[index] for segment in segments for index in segment.wanted]
        rows[[token == self.sick for token in wanted]] = torch.nan
        return rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_whose_logits_are_no_numbers_ends_alone(temperature: float) -> None:
    """The others of its step go on, and no later session finds what it has computed."""
    bench = Bench(SickRunner())
    prompt = (1, 2, 3, 4, 5, 6, 8, 9, SickRunner.sick)
    sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=1)
    well = bench.open(opening((9, 9), sampling=sampling))
    for _ in range(2):
        sick = bench.open(opening(prompt, sampling=sampling))
        bench.run()
        opened, error = events(sick)
        assert isinstance(opened, Opened)
        assert opened.cached_length == 0
        assert isinstance(error, InternalError)
        assert str(error).startswith("after 9 tokens the model gives NaN; set dtype")
    assert verdicts(well)[-1].finish_reason is FinishReason.LENGTH
    bench.close(well)
    assert bench.core.statistics.used == 0


def test_candidates_that_are_not_taken_may_have_no_numbers() -> None:
    """Only rows that choose a committed token count."""
    bench = Bench(SickRunner())
    truth = greedy_text((1, 2, 3), 4)
    assert SickRunner.sick not in truth
    stream = bench.open(opening((1, 2, 3), sampling=SamplingParams(max_tokens=4)))
    bench.propose(stream, block(0, [(-4, SickRunner.sick, 1.0)], base=4))
    bench.run()
    received = verdicts(stream)
    assert sum(verdict.verified for verdict in received) == 1
    assert text(received) == truth
