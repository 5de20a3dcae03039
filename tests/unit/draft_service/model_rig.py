"""A tiny random model behind the drafter, with every forward checked against a fresh one."""

from __future__ import annotations

import torch

from draft_service.drafters.model import ModelDrafter
from outrider.config import DraftConfig
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from outrider.sampling.chooser import SamplingRow, choose
from outrider.sampling.history import History
from tests.unit.draft_service.fakes import Bench

MAX_DIFFERENCE = 1e-3


class CheckedRunner(ModelRunner):
    """Compares the logits of every wanted token with those of a plain forward over its whole path."""

    checking = True
    """Off where the pages of the check itself would be in the way."""
    checked = 0
    sessions = 0
    survivors = 0

    def commit(self, kv, keep, tokens, survivors=()):
        """Commit and count the nodes that live on."""
        self.survivors += len(survivors)
        super().commit(kv, keep, tokens, survivors)

    def forward(self, segments):
        """Run and compare."""
        starts = [segment.kv.scratch for segment in segments]
        logits = super().forward(segments)
        self.sessions = max(self.sessions, len(segments))
        if self.checking:
            self._check(segments, starts, logits)
        return logits

    def _check(self, segments, starts, logits):
        row = 0
        for segment, start in zip(segments, starts, strict=True):
            for index in segment.wanted:
                fresh = self.fresh(path_of(segment.kv, start + index))
                assert (logits[row] - fresh).abs().max() < MAX_DIFFERENCE
                row += 1
        self.checked += row

    def fresh(self, tokens):
        """Logits [V] after `tokens`, with nothing reused."""
        kv = SequenceKv.open(self.pool, [])
        logits = super().forward([Segment(kv, tokens, None, [len(tokens) - 1])])
        kv.release()
        return logits[0]


def path_of(kv, offset):
    """All tokens from the beginning to a scratch entry."""
    path = []
    while offset >= 0:
        path.append(kv.scratch_tokens[offset])
        offset = kv.parents[offset]
    return [*kv.tokens, *reversed(path)]


class Rig(Bench):
    """A core over the model, turned by hand."""

    def __init__(self, loaded, *, num_pages=128, page_size=4, **config):
        torch.set_num_threads(1)
        self.runner = CheckedRunner(loaded, num_pages, page_size)
        settings = DraftConfig(**config)
        self.drafter = ModelDrafter(self.runner, children=settings.children, max_nodes=settings.max_nodes)
        super().__init__(self.drafter, **config)

    def run(self, turns=30):
        """Turn until nothing is worth expanding, or so many times."""
        for _ in range(turns):
            if not self.step():
                return

    def tree(self, stream):
        """The candidate tree of a session."""
        return self.session(stream).tree

    def target_token(self, opening, tokens):
        """What the same model as target chooses after `tokens`."""
        length, prompt = len(tokens), opening.prompt_length
        history = History(tokens[:prompt], tokens[prompt:])
        row = SamplingRow(opening.sampling, length, length - prompt, history)
        logits = self.runner.fresh(tokens)[None]
        return choose(logits, [row], self.runner.loaded.eos_token_ids)[0]

    def check_pages(self):
        """Every page belongs to an open sequence, or to nobody."""
        owners = [sequence.kv for sequence in self.drafter._sequences.values() if sequence.kv]
        self.runner.pool.check_integrity(owners)
