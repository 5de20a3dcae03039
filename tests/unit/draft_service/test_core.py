"""The bench loop, turned by hand, over a drafter that is a table."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from draft_service.drafters.base import Candidate, CandidateSource, Proposal
from outrider.protocol.errors import Overloaded, Unavailable
from outrider.protocol.messages import FinishReason
from outrider.telemetry.spans import shutdown_tracing, step_span_id, use_processor
from tests.unit.draft_service.fakes import Bench, TableDrafter, request, verdict

TRACEPARENT = f"00-{1:032x}-{2:016x}-01"


def _successor(tokens):
    """The next number is likely, the one after it less so."""
    return ((tokens[-1] + 1, 10), (tokens[-1] + 2, 16))  # buckets of about 0.5 and 0.05


def _make(drafter=None, **config):
    return Bench(drafter or TableDrafter(_successor), **({"expansions": 4} | config))


def _start(bench, bound=1000, **opening):
    return bench.open(request(**opening), bound)


def test_a_session_gets_blocks_and_one_of_them_is_ready():
    """The tree grows until nothing is worth it; waiting for more is over before that."""
    bench = _make()
    _, outbox = _start(bench)
    bench.run()
    blocks = outbox.read()
    assert outbox.cached_length == 0
    assert sum(block.ready for block in blocks) == 1
    assert blocks[0].tokens[0] == 4
    ids = [block.first_id + i for block in blocks for i in range(len(block))]
    assert ids == list(range(len(ids)))


def test_a_verdict_moves_the_root_and_growth_goes_on():
    """What the next blocks say continues the committed tokens."""
    bench = _make()
    stream, outbox = _start(bench)
    bench.run()
    outbox.read()
    bench.verdict(stream, verdict(3, 4, 99))
    bench.run()
    first = outbox.read()[0]
    assert (first.parents[0], first.tokens[0], first.base_length) == (-5, 100, 5)


def test_one_forward_serves_several_sessions():
    """The second session does not wait for the first one's tree."""
    drafter = TableDrafter(_successor)
    bench = _make(drafter)
    (one, _), (two, _) = _start(bench), _start(bench, tokens=(7, 8))
    bench.step()
    assert sorted(drafter.batches[0]) == [(one.id, None), (two.id, None)]


def test_an_unread_outbox_stops_only_its_own_session():
    """A slow reader holds back nobody else, and goes on when there is room."""
    bench = _make()
    (_, slow), (_, fast) = _start(bench, bound=2), _start(bench)
    bench.run()
    assert len(slow.blocks) == 2
    assert len(fast.blocks) > 2
    slow.read()
    assert bench.step()
    bench.step()
    assert slow.blocks


def test_a_sequential_session_says_ready_after_every_verdict_and_then_stops():
    """Drafting and verification alternate, and neither waits for ever."""
    bench = _make()
    stream, outbox = _start(bench, pipelined=False)
    committed = 3
    for step, tokens in enumerate([(4, 5), (77,), (78, 79, 80)], 1):
        bench.run()
        blocks = outbox.read()
        assert [block.ready for block in blocks] == [False] * (len(blocks) - 1) + [True]
        bench.verdict(stream, verdict(committed, *tokens, step=step))
        committed += len(tokens)


def test_a_session_with_nothing_to_propose_says_so():
    """An empty ready block tells the verify side not to wait."""
    bench = _make(TableDrafter(lambda tokens: ()))
    _, outbox = _start(bench, pipelined=False)
    bench.run()
    assert [(len(block), block.ready) for block in outbox.read()] == [(0, True)]


def test_a_long_prompt_is_computed_over_several_turns():
    """The root is answered when its prefill is done."""
    drafter = TableDrafter(_successor, prefill_turns=3)
    bench = _make(drafter)
    _, outbox = _start(bench, pipelined=False)
    for _ in range(4):
        assert not outbox.blocks
        bench.step()
    assert outbox.blocks[0].tokens[0] == 4


def test_a_draft_that_computes_a_long_text_shows_after_each_verdict_that_it_is_at_work():
    """An empty block, which is no answer: otherwise it would be taken for one that is stuck, and given up."""
    bench = _make(TableDrafter(_successor, prefill_turns=7))
    stream, outbox = _start(bench)
    bench.step()
    for step in (1, 2):
        bench.verdict(stream, verdict(2 + step, 3 + step, step=step))
        for _ in range(2):
            bench.step()
    assert [(block.empty, block.base_length) for block in outbox.read()] == [(True, 4), (True, 5)]
    for _ in range(3):
        bench.step()
    assert outbox.read()[0].tokens[0] == 6


def test_recalled_candidates_are_sent_without_a_forward():
    """They cost nothing, so they go out at once."""
    drafter = TableDrafter(_successor)
    drafter.expands = False
    drafter.recalls[1] = Proposal(
        [Candidate(4, CandidateSource.LOOKUP, 5, 0), Candidate(5, CandidateSource.LOOKUP, 6, 0, 0)]
    )
    bench = _make(drafter)
    _, outbox = _start(bench)
    assert not bench.step()
    assert [(block.tokens, block.ready) for block in outbox.read()] == [((4, 5), True)]


def test_out_of_memory_suspends_the_newest_session_until_it_fits():
    """Older sessions go on; the suspended one says ready, and drafts again when there is room."""
    drafter = TableDrafter(_successor, room=1)
    bench = _make(drafter)
    (old, first), (new, second) = _start(bench), _start(bench, tokens=(50,))
    bench.run()
    assert set(drafter.holding) == {old.id}
    assert first.read()
    assert [(len(block), block.ready) for block in second.read()] == [(0, True)]
    bench.close(old)
    bench.run()
    assert set(drafter.holding) == {new.id}
    assert second.read()[0].tokens[0] == 51


def test_more_sessions_than_allowed_are_refused():
    """The refusal names the limit; the open session goes on."""
    bench = _make(max_sessions=1)
    _, first = _start(bench)
    _, second = _start(bench)
    bench.run()
    assert first.blocks
    assert isinstance(second.error, Overloaded)


def test_a_closed_session_frees_its_memory_in_the_same_turn():
    """Also when it is closed twice, or was never admitted."""
    drafter = TableDrafter(_successor)
    bench = _make(drafter, max_sessions=1)
    (one, _), (two, _) = _start(bench), _start(bench)
    bench.step()
    for stream in (one, one, two):
        bench.close(stream)
    bench.step()
    assert (bench.core._entries, drafter.tokens, drafter.holding, bench.core.pages.used) == ({}, {}, {}, 0)


def test_a_verdict_that_comes_during_a_forward_kills_what_was_just_drafted():
    """Blocks are sent after it was absorbed: nothing stale goes out."""
    drafter = TableDrafter(_successor)
    bench = _make(drafter)
    stream, outbox = _start(bench)
    drafter.children = lambda tokens: (bench.verdict(stream, verdict(3, 99)), _successor(tokens))[1]
    bench.step()
    drafter.children = _successor
    bench.run()
    assert outbox.blocks[0].parents[0] == -4


def test_a_finished_session_is_sent_nothing_more():
    """The last verdict ends it; the stream is closed by the other side."""
    bench = _make()
    stream, outbox = _start(bench)
    bench.verdict(stream, verdict(3, 4, finish_reason=FinishReason.STOP))
    bench.run()
    assert not outbox.blocks


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
        bench = _make()
        _, outbox = _start(bench, traceparent=TRACEPARENT, first_step=4)
        bench.step()
        bench.step()
    finally:
        shutdown_tracing()
    span = spans.ended[0]
    assert span.name == "draft.expand"
    assert span.parent.span_id == step_span_id(TRACEPARENT, 5)
    assert int(outbox.blocks[0].traceparent.split("-")[2], 16) == span.context.span_id


class FullDrafter(TableDrafter):
    """Fails with an error from the second forward on, until it is mended."""

    def __init__(self, error):
        super().__init__(_successor)
        self.error = error

    def expand(self, expansions):
        """Look the children up."""
        if self.batches and self.error is not None:
            raise self.error
        return super().expand(expansions)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_a_forward_without_memory_ends_the_sessions_alone(error):
    """They can be opened again; the log says which settings to lower, and nothing is left of them."""
    drafter = FullDrafter(error)
    bench = _make(drafter)
    streams = [_start(bench) for _ in range(2)]
    with capture_logs() as logs:
        bench.run()
    assert all(isinstance(outbox.error, Unavailable) for _, outbox in streams)
    assert (drafter.tokens, drafter.holding) == ({}, {})
    assert logs[0]["problem"].startswith("no memory is left (")
    for stream, _ in streams:  # what was on its way
        bench.verdict(stream, verdict(3, 4))
        bench.close(stream)
    drafter.error = None
    _, outbox = _start(bench)
    bench.run()
    assert outbox.read()[0].tokens[0] == 4


def test_other_errors_of_a_forward_end_the_engine():
    """A GPU that has failed is of no more use to the process."""
    bench = _make(FullDrafter(RuntimeError("CUDA error: device-side assert triggered")))
    _start(bench)
    with pytest.raises(RuntimeError, match="device-side"):
        bench.run()
