"""What a verify step does on the host depends on what is new, not on how long the context is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.engine.runner import Segment
from outrider.protocol.messages import SamplingParams
from outrider.speculation import lookup
from outrider.speculation.lookup import Lookup
from tests.allocations import allocated, usually_allocated
from tests.unit.verify_service.fakes import Bench, FakeRunner, chain_block, events, opening
from verify_service.session import VerifyLimits

SHORT, LONG = 1_000, 32_000
VOCABULARY = 64
LIMITS = VerifyLimits(
    max_nodes=32,
    max_tree_nodes=64,
    context_length=40_960,
    vocabulary_size=VOCABULARY,
    eos_token_ids=frozenset(),
    max_patience=0.0,
)
KILOBYTE = 1024


class ConstantRunner(FakeRunner):
    """A target that always says the same: its forwards keep the accounts, and nothing else."""

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits whose largest is that of token 7."""
        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
            segment.kv.append(segment.tokens, segment.parents)
        logits = torch.zeros(sum(len(segment.wanted) for segment in segments), VOCABULARY)
        logits[:, 7] = 1.0
        return logits


def bench_with(length: int, **fields: object) -> tuple[Bench, object]:
    """A core with one session of so many tokens, all of them computed."""
    bench = Bench(ConstantRunner(4096, 16), limits=LIMITS, max_step_tokens=4096)
    prompt = tuple(place * 31 % VOCABULARY for place in range(length))
    stream = bench.open(opening(prompt, **({"lookup": True} | fields)))
    while not events(stream)[-1:] or bench.core.sessions[stream.id].uncomputed > 1:
        bench.core.turn([])
    for _ in range(length // lookup.PIECE + 1):
        bench.core.turn([])
    return bench, stream


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.2, logprobs=2)],
    ids=["greedy", "sampled", "penalties"],
)
def test_a_step_copies_nothing_of_its_context(sampling: SamplingParams) -> None:
    """With lookup and nodes: what is held for a moment is as much at 32,000 tokens as at 1,000."""
    sizes = []
    for length in (SHORT, LONG):
        bench, stream = bench_with(length, sampling=sampling)
        next_id = iter(range(0, 10_000, 8))

        def step(bench: Bench = bench, stream: object = stream, next_id: object = next_id) -> None:
            session = bench.core.sessions[stream.id]
            base = session.tree.committed_length
            bench.propose(stream, chain_block(next(next_id), base, [7] * 6))
            events(stream)

        sizes.append(usually_allocated(step))
    assert sizes[1] < sizes[0] + 8 * KILOBYTE


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its opening does not hold up other sessions: no step indexes more than a piece of it."""
    pieces: list[int] = []
    append = Lookup.append

    def count(self: Lookup, tokens: Sequence[int]) -> None:
        pieces.append(len(tokens))
        append(self, tokens)

    monkeypatch.setattr(Lookup, "append", count)
    bench, _ = bench_with(LONG)
    assert max(pieces) == lookup.PIECE
    assert sum(pieces) >= LONG
    assert bench.core.sessions


def test_a_chunk_of_a_prompt_takes_as_much_wherever_it_is() -> None:
    """The last chunks of a prompt copy no more than the first: prefill is no quadratic work of the host."""
    bench = Bench(ConstantRunner(4096, 16), limits=LIMITS, max_step_tokens=512)
    bench.open(opening(tuple(place % VOCABULARY for place in range(LONG)), lookup=False))
    bench.core.turn([])
    sizes = [allocated(lambda: bench.core.turn([])) for _ in range(50)]
    early, late = sorted(sizes[:9])[4], sorted(sizes[-9:])[4]
    assert late < early + 8 * KILOBYTE
