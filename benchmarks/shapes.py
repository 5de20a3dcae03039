"""Times a forward of a random model with the shape of another: plain, and as this engine runs it.

    python -m benchmarks.shapes bamba --steps chain-1 chain-5 tree-9 tree-16 prompt-300

A step is a chain of candidates, a tree of them (at most 5 levels) or a prompt, after a context. The plain
arm is the model's own modules, whose recurrent layers compute candidates level by level. Nothing is
downloaded. All arms in turn, in the time of one thread and not of the wall; medians in ms, and ÷ plain turn
by turn [quartiles].
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks import machine
from benchmarks.samples import Spread
from benchmarks.step import PAGES, Arm, in_turn
from outrider.cli import values
from outrider.engine.cpu.backend import AUTO, Backend
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.quantization.rounding import BITS
from outrider.engine.runner import ModelRunner, Segment
from scripts import console

_MIXER: dict[str, Any] = {"mamba_d_head": 64, "mamba_d_state": 128}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 32768,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # Qwen 3 0.6B
    "qwen3": {**_sizes(1024, 3072, 28, 16, 8), "head_dim": 128, "vocab_size": 151936},
    "qwen3_moe": {
        **_sizes(1024, 3072, 8, 16, 4),
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    # the heads of DeepSeek V2 Lite, without experts
    "deepseek_v2": {
        **_sizes(2048, 3840, 6, 16, 16),
        "first_k_dense_replace": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    # half of the layers of Qwen 3.5 0.8B
    "qwen3_5": {
        **_sizes(1024, 3584, 12, 8, 2),
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "bamba": {
        **_sizes(1024, 2496, 14, 16, 4),
        **_MIXER,
        "attn_layer_indices": [6, 13],
        "mamba_n_heads": 32,
    },
    # LFM2 350M
    "lfm2": {
        **_sizes(1024, 4608, 16, 16, 8),
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    # some layers of Falcon H1 0.5B
    "falcon_h1": {
        **_sizes(1024, 2048, 16, 8, 2),
        **_MIXER,
        "head_dim": 64,
        "mamba_n_heads": 24,
        "mamba_d_ssm": 1536,
    },
}
"""The arguments of a configuration of transformers; its type is the name unless `model_type` is given."""


def main() -> int:
    """Measure and print."""
    flags = _flags()
    torch.set_num_threads(1)
    print(machine.lines(machine.describe()) + "\n")
    arms = _arms(flags)
    print(f"{flags.shape}, {flags.dtype}, after {flags.context} tokens")
    print("step        " + "".join(map(_head, arms)))
    for step in flags.steps:
        calls = [arm.forward(step.segment(arm.kv, _tokens(arm.runner, step.count))) for arm in arms.values()]
        print(f"{step.name:12}{_line(in_turn(calls, flags.rounds))}", flush=True)
    return 0


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of a forward."""

    kind: Literal["chain", "tree", "prompt"]
    count: int

    @property
    def name(self) -> str:
        """The step as the flag names it."""
        return f"{self.kind}-{self.count}"

    def parents(self) -> list[int] | None:
        """The parents of a tree's candidates: chains of four below the first, so at most five levels."""
        behind = [0 if node % 4 == 1 else node - 1 for node in range(1, self.count)]
        return [-1, *behind] if self.kind == "tree" else None

    def segment(self, kv: SequenceKv, tokens: Sequence[int]) -> Segment:
        """The step's tokens; the logits of all candidates are wanted, of a prompt those of its last token."""
        if self.kind == "prompt":
            return Segment(kv, tokens, None, [self.count - 1], certain=self.count)
        return Segment(kv, tokens, self.parents(), range(self.count))


def parse_step(text: str) -> Step:
    """The step that a flag names.

    Raises:
        argparse.ArgumentTypeError: it names none.
    """
    found = re.fullmatch("(chain|tree|prompt)-([1-9][0-9]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like chain-5, tree-9 or prompt-300")
    kind: Any = found[1]
    return Step(kind, int(found[2]))


def _tokens(runner: ModelRunner, count: int) -> list[int]:
    """Random tokens, the same for every arm."""
    generator, size = torch.Generator().manual_seed(count), runner.loaded.vocabulary_size
    tokens: list[int] = torch.randint(size, (count,), generator=generator).tolist()
    return tokens


def _flags() -> argparse.Namespace:
    parser = console.new_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--weights", choices=("full", *BITS), nargs="+", default=["full"], help="an arm each")
    parser.add_argument(
        "--library", action="store_true", help="the plain arm multiplies by oneDNN, experts by torch"
    )
    steps = [parse_step(text) for text in ("chain-1", "chain-5", "tree-9", "tree-16", "prompt-300")]
    parser.add_argument("--steps", type=parse_step, nargs="+", default=steps, metavar="STEP")
    parser.add_argument("--context", type=values.count, default=200, help="tokens before those of the step")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def _arms(flags: argparse.Namespace) -> dict[str, Arm]:
    """Arms by name, the plain one first."""
    with TemporaryDirectory() as folder:
        print(f"{_save(flags.shape, Path(folder), flags.dtype) / 1e6:.0f} M parameters")
        backend = Backend.ONEDNN if flags.library else AUTO
        plain = _runner(folder, dtype=flags.dtype, fused=False, cpu_backend=backend)
        _level_by_level(plain)
        runners = {weights: _runner(folder, dtype=flags.dtype, weights=weights) for weights in flags.weights}
        named = {"plain": plain, **runners}
        return {name: Arm(each, _tokens(each, flags.context)) for name, each in named.items()}


def _save(name: str, folder: Path, dtype: str) -> int:
    """Save a random model into a folder; return the number of its parameters."""
    settings = {"model_type": name, **SHAPES[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    count: int = model.num_parameters()
    return count


def _runner(folder: str, **options: Any) -> ModelRunner:
    say = console.progress if options.get("fused", True) else lambda _: None
    return ModelRunner(load_model(folder, device="cpu", threads=1, say=say, **options), PAGES, PAGE_SIZE)


def _level_by_level(runner: ModelRunner) -> None:
    """Let the model's own modules compute candidates too."""
    for layer in runner._recurrent._layers if runner._recurrent else ():
        layer.rule = None


def _head(arm: str) -> str:
    return f"{arm:>10}" if arm == "plain" else f"{arm:>10} ÷ plain             "


def _line(times: Sequence[Sequence[float]]) -> str:
    """Milliseconds of all arms, the plain one first."""
    plain, *others = times
    return f"{median(plain):10.2f}" + "".join(_compared(plain, each) for each in others)


def _compared(plain: Sequence[float], times: Sequence[float]) -> str:
    ratio = Spread.of([mine / other for mine, other in zip(times, plain, strict=True)])
    return f"{median(times):10.2f} {ratio.middle:5.2f} [{ratio.low:.2f}, {ratio.high:.2f}]  "


if __name__ == "__main__":
    console.run(main)
