"""A worker that runs Hugging Face's `generate` and assisted generation, without compilation.

python -m benchmarks.workers.hf --target DIR --draft DIR --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.workers.lines import Ask, Recorder, private_output, serve
from outrider.engine.quantization.modules import round_linears
from outrider.engine.quantization.rounding import BITS


class ArrivalStreamer(BaseStreamer):
    """Notes when the tokens of a batch's rows arrive; the prompt comes first and is dropped."""

    def __init__(self, rows: int) -> None:
        started = time.perf_counter()
        self.recorders = [Recorder(started) for _ in range(rows)]
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take one token per row, or several of the only row."""
        if self._prompt_seen:
            for recorder, tokens in zip(
                self.recorders, value.reshape(len(self.recorders), -1).tolist(), strict=True
            ):
                recorder.add(tokens)
        self._prompt_seen = True

    def end(self) -> None:
        """See transformers' streamers; does nothing here."""


class Models:
    """Target and draft, without ends: every request gives as many tokens as asked for."""

    def __init__(self, target: str, draft: str, dtype: str, weights: str) -> None:
        self.target = _load(target, dtype, weights)
        self.draft = _load(draft, dtype)

    def run(self, ask: Ask) -> Sequence[Recorder]:
        """Serve all prompts in one padded batch; a draft serves one prompt at a time."""
        torch.set_num_threads(ask["threads"])
        torch.manual_seed(ask["seed"])
        ids, mask = _padded(ask["prompts"])
        stream = ArrivalStreamer(len(ids))
        with torch.inference_mode():
            self.target.generate(
                ids,
                attention_mask=mask,
                streamer=stream,
                max_new_tokens=ask["tokens"],
                **_sampling(ask["temperature"]),
                **self._assisted(ask["assistant_tokens"]),
            )
        return stream.recorders

    def _assisted(self, tokens: int) -> dict[str, Any]:
        """Draft `tokens` tokens at a time; 0: none, below 0: as many as is the default."""
        if not tokens:
            return {}
        given = (tokens, "constant", 0.0) if tokens > 0 else (None, None, None)
        settings = self.draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = given[:2]
        settings.assistant_confidence_threshold = given[2]
        return {"assistant_model": self.draft}


def load_reference(folder: str | Path, stored: torch.dtype, computed: torch.dtype, weights: str) -> Any:
    """A model by `transformers`: weights of one dtype, perhaps rounded, and arithmetic of another."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=stored)
    model.to(computed)
    if weights != "full":
        round_linears(model, BITS[weights])
    return model.eval()


def _load(folder: str, dtype: str, weights: str = "full") -> Any:
    kind = getattr(torch, dtype)
    model = load_reference(folder, kind, kind, weights)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [prompts, longest], padded at the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="full")
    flags = parser.parse_args()
    output = private_output()
    models = Models(flags.target, flags.draft, flags.dtype, flags.weights)
    serve(output, {"transformers": transformers.__version__, "torch": str(torch.__version__)}, models.run)


if __name__ == "__main__":
    main()
