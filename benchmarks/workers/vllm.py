"""A worker that runs vLLM's CPU engine in its process; needs a Python that has vLLM.

VLLM_PYTHON -m benchmarks.workers.vllm --target DIR [--draft DIR | --draft ngram] --assistant-tokens 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.workers.lines import Ask, Recorder, private_output, serve

NGRAM = "ngram"


class Engine:
    """One engine with one kind of speculation."""

    def __init__(self, flags: argparse.Namespace) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._engine: Any = LLM(
            model=flags.target,
            dtype=flags.dtype,
            max_model_len=flags.context,
            max_num_seqs=flags.sequences,
            enable_prefix_caching=False,
            speculative_config=_speculation(flags.draft, flags.assistant_tokens),
            seed=0,
        ).llm_engine
        self._sent = 0

    def run(self, ask: Ask) -> Sequence[Recorder]:
        """Serve all prompts at once."""
        started = time.perf_counter()
        recorders = {self._send(prompt, ask): Recorder(started) for prompt in ask["prompts"]}
        left = set(recorders)
        while left:
            for output in self._engine.step():
                recorder = recorders[output.request_id]
                recorder.add(output.outputs[0].token_ids[len(recorder.tokens) :])
                if output.finished:
                    left.remove(output.request_id)
        return list(recorders.values())

    def _send(self, prompt: Sequence[int], ask: Ask) -> str:
        from vllm import SamplingParams

        self._sent += 1  # a seed would put the request on a slower path that few use
        name = f"r{self._sent}"
        sampling = SamplingParams(
            temperature=ask["temperature"], max_tokens=ask["tokens"], ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


def _speculation(draft: str, tokens: int) -> dict[str, Any] | None:
    if not draft:
        return None
    if draft == NGRAM:
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"method": NGRAM, "num_speculative_tokens": tokens, **lookup}
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": tokens}


def main() -> None:
    """Load, compile, and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="", help="a folder, or ngram")
    parser.add_argument("--assistant-tokens", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=32)
    flags = parser.parse_args()
    output = private_output()
    engine = Engine(flags)
    serve(output, _versions(), engine.run)


def _versions() -> dict[str, str]:
    import torch
    import vllm

    platform = type(vllm.platforms.current_platform).__name__
    return {"vllm": vllm.__version__, "torch": torch.__version__, "platform": platform}


if __name__ == "__main__":
    main()
