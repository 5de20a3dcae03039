"""What plain `transformers` says: the yardstick of the exactness tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.engine.quantization.modules import round_linears
from outrider.engine.quantization.rounding import BITS
from tests.models import plain_model

torch.set_num_threads(1)


class Reference:
    """A model run by `transformers` alone, in float32, perhaps with rounded weights."""

    def __init__(self, model: str | Path, weights: str = "full") -> None:
        self.model = plain_model(model)
        if weights != "full":
            round_linears(self.model, BITS[weights])
        self.vocabulary_size: int = self.model.config.get_text_config().vocab_size

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """`generate(do_sample=False)`, end-of-sequence tokens ignored."""
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] at every position."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()

    def explain(self, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]) -> str:
        """Where two continuations part, and how sure the target was there."""
        pairs = zip(expected, actual, strict=False)
        at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
        logprobs = self.logits([*prompt, *expected[:at]])[-1].log_softmax(-1)
        best = logprobs.topk(2)
        margin = (best.values[0] - best.values[1]).item()
        return (
            f"first difference at token {at} of {len(expected)}: expected {list(expected[at : at + 4])}, "
            f"got {list(actual[at : at + 4])}; the target's best two there are {best.indices.tolist()} "
            f"with a margin of {margin:.3g} nats"
        )


def assert_same(
    reference: Reference, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
) -> None:
    """Fail with the target's margin at the first difference."""
    assert list(actual) == list(expected), reference.explain(prompt, expected, actual)
