"""The packed, paged forward computes what the plain model computes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError, OutOfPages
from tests.models import ARCHITECTURES
from tests.unit.engine.conftest import Pair

VOCABULARY = 300


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(2, VOCABULARY) for _ in range(count)]


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32 rounding, and the same token chosen."""
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-4)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def runner_of(pair: Pair, num_pages: int = 64, page_size: int = 4) -> ModelRunner:
    """A runner with memory of its own; earlier runners of the model are not used any more."""
    return ModelRunner(pair.loaded, num_pages, page_size)


def prefill(runner: ModelRunner, tokens: list[int]) -> SequenceKv:
    """A sequence with all of `tokens` committed."""
    kv = SequenceKv.open(runner.pool, tokens)
    rest = tokens[kv.length :]
    runner.forward([Segment(kv, rest, None, [], certain=len(rest))])
    runner.commit(kv, range(len(rest)), rest)
    return kv


@pytest.fixture(params=list(ARCHITECTURES))
def pair(request: pytest.FixtureRequest, pair_of: Callable[..., Pair]) -> Pair:
    """A model of every architecture."""
    return pair_of(request.param)


@pytest.fixture
def llama(pair_of: Callable[..., Pair]) -> Pair:
    """One model, where the architecture does not matter."""
    return pair_of("llama")


class TestAgainstThePlainModel:
    """Every architecture; the sequences are longer than its sliding window."""

    def test_prefill_in_chunks(self, pair: Pair) -> None:
        """Chunks of uneven length give the logits of one forward."""
        tokens = tokens_of(1, 40)
        runner, got = runner_of(pair), []
        kv = SequenceKv.open(runner.pool, tokens)
        for start, stop in ((0, 1), (1, 20), (20, 23), (23, 40)):
            chunk = tokens[start:stop]
            got.append(runner.forward([Segment(kv, chunk, None, range(len(chunk)))]))
            runner.commit(kv, range(len(chunk)), chunk)
        assert_same(torch.cat(got), pair.expected(tokens))

    def test_one_long_chunk(self, pair: Pair) -> None:
        """A chunk too long for the folded form, alone and behind a committed prefix."""
        tokens = tokens_of(2, 170)
        runner = runner_of(pair)
        kv = SequenceKv.open(runner.pool, tokens)
        first = runner.forward([Segment(kv, tokens[:80], None, range(80))])
        runner.commit(kv, range(80), tokens[:80])
        second = runner.forward([Segment(kv, tokens[80:], None, range(90))])
        assert_same(torch.cat([first, second]), pair.expected(tokens))

    def test_a_tree(self, pair: Pair) -> None:
        """Every node sees its own path, grown in two forwards, and nothing else."""
        prompt, nodes = tokens_of(3, 21), tokens_of(4, 9)
        parents = [-1, 0, 0, 1, 2, 2, 3, 5, -1]
        runner = runner_of(pair)
        kv = prefill(runner, prompt)
        logits = [
            runner.forward([Segment(kv, nodes[:4], parents[:4], range(4))]),
            runner.forward([Segment(kv, nodes[4:], parents[4:], range(5))]),
        ]
        for node, row in enumerate(torch.cat(logits)):
            path, at = [], node
            while at >= 0:
                path.insert(0, nodes[at])
                at = parents[at]
            assert_same(row, pair.expected(prompt + path)[-1])

    def test_commit_compacts_and_survivors_live_on(self, pair: Pair) -> None:
        """After a path was kept and moved, what follows sees the right keys and values."""
        prompt, nodes = tokens_of(5, 18), tokens_of(6, 8)
        runner = runner_of(pair)
        kv = prefill(runner, prompt)
        runner.forward([Segment(kv, nodes, [-1, 0, 0, 1, 2, 2, 4, 5], [])])
        runner.commit(kv, [0, 2], [nodes[0], nodes[2]], survivors=[5, 7])
        logits = runner.forward([Segment(kv, [7, 9], [1, 0], [0, 1])])
        path = [*prompt, nodes[0], nodes[2], nodes[5]]
        assert_same(logits[0], pair.expected([*path, nodes[7], 7])[-1])
        assert_same(logits[1], pair.expected([*path, 9])[-1])

    def test_a_ragged_batch(self, pair: Pair) -> None:
        """Decoding, a tree and two prefill chunks in one forward do not touch each other."""
        runner = runner_of(pair)
        prompts = [tokens_of(seed, count) for seed, count in ((7, 30), (8, 5), (9, 11), (10, 90))]
        decoding, tree = prefill(runner, prompts[0]), prefill(runner, prompts[1])
        fresh = [SequenceKv.open(runner.pool, prompt) for prompt in prompts[2:]]
        logits = runner.forward(
            [
                Segment(fresh[1], prompts[3], None, [89]),
                Segment(decoding, [40], None, [0]),
                Segment(fresh[0], prompts[2], None, [10, 3]),
                Segment(tree, [50, 51, 52], [-1, 0, 0], [2, 1]),
            ]
        )
        third = pair.expected(prompts[2])
        expected = [
            pair.expected(prompts[3])[-1],
            pair.expected([*prompts[0], 40])[-1],
            third[10],
            third[3],
            pair.expected([*prompts[1], 50, 52])[-1],
            pair.expected([*prompts[1], 50, 51])[-1],
        ]
        assert_same(logits, torch.stack(expected))

    def test_a_reused_prefix(self, pair: Pair) -> None:
        """A sequence that found its beginning in the cache continues as if it had computed it."""
        tokens = tokens_of(11, 30)
        runner = runner_of(pair)
        prefill(runner, tokens[:26]).release()
        kv = SequenceKv.open(runner.pool, tokens)
        assert kv.length == 24
        logits = runner.forward([Segment(kv, tokens[24:], None, range(6))])
        assert_same(logits, pair.expected(tokens)[24:])


class TestRunner:
    """Behaviour that does not depend on the architecture."""

    def test_a_fork_goes_its_own_way(self, llama: Pair) -> None:
        """Both sequences continue differently from the same beginning."""
        runner, tokens = runner_of(llama), tokens_of(12, 10)
        kv = prefill(runner, tokens)
        copy = runner.fork(kv)
        logits = runner.forward([Segment(kv, [5], None, [0]), Segment(copy, [6], None, [0])])
        assert_same(logits[0], llama.expected([*tokens, 5])[-1])
        assert_same(logits[1], llama.expected([*tokens, 6])[-1])
        runner.pool.check_integrity([kv, copy])

    def test_a_rolled_back_forward_leaves_no_trace(self, llama: Pair) -> None:
        """Rejected candidates change nothing of what comes after."""
        runner, tokens = runner_of(llama), tokens_of(13, 10)
        kv = prefill(runner, tokens)
        runner.forward([Segment(kv, tokens_of(14, 20), None, [])])
        kv.rollback()
        logits = runner.forward([Segment(kv, [5], None, [0])])
        assert_same(logits[0], llama.expected([*tokens, 5])[-1])

    def test_without_pages_nothing_runs(self, llama: Pair) -> None:
        """The error comes before any sequence has grown."""
        runner = runner_of(llama, num_pages=4)
        first, second = prefill(runner, tokens_of(15, 4)), prefill(runner, tokens_of(16, 4))
        with pytest.raises(OutOfPages):
            runner.forward([Segment(first, [1] * 4, None, []), Segment(second, [1] * 8, None, [])])
        assert (first.scratch, second.scratch) == (0, 0)
        runner.forward([Segment(first, [1] * 4, None, []), Segment(second, [1] * 4, None, [])])

    def test_logits_are_the_callers_to_change(self, llama: Pair) -> None:
        """They are float32 and may be written to."""
        runner = runner_of(llama)
        kv = SequenceKv.open(runner.pool, [1])
        logits = runner.forward([Segment(kv, [1, 2], None, [1])])
        assert (logits.dtype, logits.shape) == (torch.float32, (1, VOCABULARY))
        logits.zero_()

    def test_too_much_kv_memory_is_refused(self, llama: Pair) -> None:
        """The sentence names the setting to lower."""
        with pytest.raises(ModelError, match="kv_tokens: no memory for"):
            ModelRunner(llama.loaded, 1, 2**45)

    def test_no_logits_when_none_are_wanted(self, llama: Pair) -> None:
        """A prefill chunk that is not the last returns no rows."""
        runner = runner_of(llama)
        kv = SequenceKv.open(runner.pool, [1])
        assert runner.forward([Segment(kv, [1, 2], None, [])]).shape == (0, VOCABULARY)

    @pytest.mark.parametrize(
        "architecture", ["llama", "gpt2", "gemma2", "qwen3_5", "qwen3_next", "olmo_hybrid"]
    )
    def test_results_do_not_depend_on_the_batch(
        self, pair_of: Callable[..., Pair], architecture: str
    ) -> None:
        """In bfloat16, step by step, as a chunk, between candidates or among others: the same bits."""
        pair = pair_of(architecture, "bfloat16")
        runner, prompt, tail = runner_of(pair, 128), tokens_of(17, 12), tokens_of(18, 4)
        alone = prefill(runner, prompt)
        steps = []
        for token in tail:
            steps.append(runner.forward([Segment(alone, [token], None, [0])])[0])
            runner.commit(alone, [0], [token])
        chunk = runner.forward([Segment(prefill(runner, prompt), tail, None, range(4))])
        nodes = [tail[0], 9, tail[1], 8, tail[2], tail[3], 7]
        tree = Segment(prefill(runner, prompt), nodes, [-1, -1, 0, 0, 2, 4, 4], [0, 2, 4, 5])
        others = [Segment(prefill(runner, tokens_of(19 + i, 12 + i)), [3], None, []) for i in range(3)]
        among = runner.forward([*others, tree])
        assert torch.equal(torch.stack(steps), chunk)
        assert torch.equal(chunk, among)
