"""The engine loop, turned by hand, over a drafter that is a table."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from draft_service.drafters.base import Candidate, Proposal, Source
from draft_service.engine import PENDING_PER_SESSION, DraftEngine
from outrider.config import DraftConfig
from outrider.errors import InternalError, Overloaded
from outrider.messages import FinishReason
from outrider.telemetry.instruments import DraftInstruments
from outrider.telemetry.spans import shutdown_tracing, step_span_id, use_processor
from tests.unit.draft_service.fakes import ListOutbox, TableDrafter, request, verdict

TRACEPARENT = f"00-{1:032x}-{2:016x}-01"


def _successor(tokens):
    """The next number is likely, the one after it less so."""
    return ((tokens[-1] + 1, 10), (tokens[-1] + 2, 16))  # buckets of about 0.5 and 0.05


def _make(drafter=None, **config):
    """An engine that the test turns by hand; every look at the clock is one millisecond later."""
    ticks = iter(range(10**9))
    return DraftEngine(
        drafter or TableDrafter(_successor),
        DraftConfig(**({"expansions": 4} | config)),
        DraftInstruments(CollectorRegistry()),
        clock=lambda: next(ticks) * 1e-3,
        wall_ns=lambda: 1_000,
    )


def _run(engine):
    """Turn until nothing is worth expanding."""
    turns = 0
    while engine.step():
        turns += 1
        assert turns < 200, "the tree grows without end"
    return turns


def _start(engine, bound=1000, **opening):
    outbox = ListOutbox(bound)
    return engine.open(request(**opening), outbox), outbox


def test_a_session_gets_blocks_and_one_of_them_is_ready():
    """The tree grows until nothing is worth it; waiting for more is over before that."""
    engine = _make()
    _, outbox = _start(engine)
    _run(engine)
    blocks = outbox.read()
    assert outbox.cached_length == 0
    assert sum(block.ready for block in blocks) == 1
    assert blocks[0].tokens[0] == 4
    ids = [block.first_id + i for block in blocks for i in range(len(block))]
    assert ids == list(range(len(ids)))


def test_a_verdict_moves_the_root_and_growth_goes_on():
    """What the next blocks say continues the committed tokens."""
    engine = _make()
    key, outbox = _start(engine)
    _run(engine)
    outbox.read()
    engine.verdict(key, verdict(3, 4, 99))
    _run(engine)
    first = outbox.read()[0]
    assert (first.parents[0], first.tokens[0], first.base_length) == (-5, 100, 5)


def test_one_forward_serves_several_sessions():
    """The second session does not wait for the first one's tree."""
    drafter = TableDrafter(_successor)
    engine = _make(drafter)
    (one, _), (two, _) = _start(engine), _start(engine, tokens=(7, 8))
    engine.step()
    assert sorted(drafter.batches[0]) == [(one, None), (two, None)]


def test_an_unread_outbox_stops_only_its_own_session():
    """A slow reader holds back nobody else, and goes on when there is room."""
    engine = _make()
    (_, slow), (_, fast) = _start(engine, bound=2), _start(engine)
    _run(engine)
    assert len(slow.blocks) == 2
    assert len(fast.blocks) > 2
    slow.read()
    assert engine.step()
    engine.step()
    assert slow.blocks


def test_a_sequential_session_says_ready_after_every_verdict_and_then_stops():
    """Drafting and verification alternate, and neither waits for ever."""
    engine = _make()
    key, outbox = _start(engine, pipelined=False)
    committed = 3
    for step, tokens in enumerate([(4, 5), (77,), (78, 79, 80)], 1):
        _run(engine)
        blocks = outbox.read()
        assert [block.ready for block in blocks] == [False] * (len(blocks) - 1) + [True]
        engine.verdict(key, verdict(committed, *tokens, step=step))
        committed += len(tokens)


def test_a_session_with_nothing_to_propose_says_so():
    """An empty ready block tells the verify side not to wait."""
    engine = _make(TableDrafter(lambda tokens: ()))
    _, outbox = _start(engine, pipelined=False)
    _run(engine)
    assert [(len(block), block.ready) for block in outbox.read()] == [(0, True)]


def test_a_long_prompt_is_computed_over_several_turns():
    """The root is answered when its prefill is done."""
    drafter = TableDrafter(_successor, prefill_turns=3)
    engine = _make(drafter)
    _, outbox = _start(engine, pipelined=False)
    for _ in range(4):
        assert not outbox.blocks
        engine.step()
    assert outbox.blocks[0].tokens[0] == 4


def test_recalled_candidates_are_sent_without_a_forward():
    """They cost nothing, so they go out at once."""
    drafter = TableDrafter(_successor)
    drafter.expands = False
    drafter.recalls[0] = Proposal([Candidate(4, Source.LOOKUP, 5, 0), Candidate(5, Source.LOOKUP, 6, 0, 0)])
    engine = _make(drafter)
    _, outbox = _start(engine)
    assert not engine.step()
    assert [(block.tokens, block.ready) for block in outbox.read()] == [((4, 5), True)]


def test_out_of_memory_suspends_the_newest_session_until_it_fits():
    """Older sessions go on; the suspended one says ready, and drafts again when there is room."""
    drafter = TableDrafter(_successor, room=1)
    engine = _make(drafter)
    (old, first), (new, second) = _start(engine), _start(engine, tokens=(50,))
    _run(engine)
    assert set(drafter.holding) == {old}
    assert first.read()
    assert [(len(block), block.ready) for block in second.read()] == [(0, True)]
    engine.close(old)
    _run(engine)
    assert set(drafter.holding) == {new}
    assert second.read()[0].tokens[0] == 51


def test_more_sessions_than_allowed_are_refused():
    """The refusal names the limit; the open session goes on."""
    engine = _make(max_sessions=1)
    _, first = _start(engine)
    _, second = _start(engine)
    _run(engine)
    assert first.blocks
    assert isinstance(second.error, Overloaded)


def test_a_closed_session_frees_its_memory_in_the_same_turn():
    """Also when it is closed twice, or was never admitted."""
    drafter = TableDrafter(_successor)
    engine = _make(drafter, max_sessions=1)
    (one, outbox), (two, _) = _start(engine), _start(engine)
    engine.step()
    for key in (one, one, two):
        engine.close(key)
    engine.step()
    assert (engine.sessions, drafter.tokens, drafter.holding, engine.pages.used) == (0, {}, {}, 0)
    assert outbox.closed


def test_a_verdict_that_comes_during_a_forward_kills_what_was_just_drafted():
    """Blocks are sent after it was absorbed: nothing stale goes out."""
    drafter = TableDrafter(_successor)
    engine = _make(drafter)
    key, outbox = _start(engine)
    drafter.children = lambda tokens: (engine.verdict(key, verdict(3, 99)), _successor(tokens))[1]
    engine.step()
    drafter.children = _successor
    _run(engine)
    assert outbox.blocks[0].parents[0] == -4


def test_a_finished_session_is_sent_nothing_more():
    """The last verdict ends it; the stream is closed by the other side."""
    engine = _make()
    key, outbox = _start(engine)
    engine.verdict(key, verdict(3, 4, finish_reason=FinishReason.STOP))
    _run(engine)
    assert not outbox.blocks


def test_verdicts_that_nobody_absorbs_are_bounded():
    """A flood is refused instead of filling the memory."""
    engine = _make(max_sessions=1)
    key, _ = _start(engine)
    for step in range(PENDING_PER_SESSION - 1):
        engine.verdict(key, verdict(3 + step, 4, step=step + 1))
    with pytest.raises(Overloaded, match="wait for the engine"):
        engine.verdict(key, verdict(1000, 4))


def test_a_sampled_request_gets_a_span_per_block():
    """It hangs below the verify step that the nodes are for, and the block names it."""

    class Spans:
        def __init__(self):
            self.ended = []

        def on_end(self, span):
            self.ended.append(span)

        def shutdown(self):
            pass

    spans = Spans()
    use_processor("draft", "d0", spans)
    try:
        engine = _make()
        _, outbox = _start(engine, traceparent=TRACEPARENT, first_step=4)
        engine.step()
        engine.step()
    finally:
        shutdown_tracing()
    span = spans.ended[0]
    assert span.name == "draft.expand"
    assert span.parent.span_id == step_span_id(TRACEPARENT, 5)
    assert int(outbox.blocks[0].traceparent.split("-")[2], 16) == span.context.span_id


def test_a_failing_drafter_ends_all_streams_and_is_reported():
    """Streams get an error instead of silence, and so does whoever comes later."""
    failed = threading.Event()

    def broken(tokens):
        raise RuntimeError("device lost")

    engine = DraftEngine(
        TableDrafter(broken), DraftConfig(), DraftInstruments(CollectorRegistry()), on_failure=failed.set
    )
    _, outbox = _start(engine)
    with capture_logs():
        engine.start()
        assert failed.wait(10)
    assert isinstance(outbox.error, InternalError)
    with pytest.raises(InternalError):
        _start(engine)
    engine.stop()


def test_the_thread_sleeps_until_there_is_news_and_stops_when_told():
    """Opening a session wakes it; stopping closes what is open."""
    admitted = threading.Event()
    engine = _make()
    outbox = ListOutbox()
    outbox.admit = lambda cached_length: admitted.set()
    engine.start()
    engine.open(request(), outbox)
    assert admitted.wait(10)
    engine.stop()
    assert outbox.closed
    assert engine.sessions == 0
