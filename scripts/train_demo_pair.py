"""Train a demo pair: a small Llama-style target, and a draft distilled from it.

    python -m scripts.train_demo_pair --out out/pair --minutes 55 --draft-minutes 60 --threads 2
    python -m scripts.train_demo_pair --out out/pair --from-target models/demo/target --draft-minutes 60

The data is the source of this Python's standard library, with 40 files held out. Both models have the same
byte-level BPE tokenizer. Muon trains the matrices of the layers, AdamW the rest. The script prints held-out
loss and top-1 of both; `outrider advise` says how often the draft is right.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.console import new_parser

END = "<|endoftext|>"
HELD_OUT_FILES = 40
MATRIX_RATE, OTHER_RATE = 0.02, 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a Llama-style model."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int


SHAPES = {
    "small": Shape(hidden=256, layers=6, mlp=704, heads=4, kv_heads=2),
    "draft": Shape(hidden=192, layers=2, mlp=512, heads=3, kv_heads=1),
    "tiny": Shape(hidden=64, layers=1, mlp=128, heads=1, kv_heads=1),
}

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Computes a scalar from a model and windows [batch, window]."""


def read_sources(limit: int) -> tuple[list[str], list[str]]:
    """Training and held-out texts: files of the standard library in a fixed random order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths[:limit]]
    held_out = min(HELD_OUT_FILES, len(texts) // 4)
    return texts[held_out:], texts[:held_out]


def train_tokenizer(texts: list[str], vocabulary_size: int) -> Tokenizer:
    """Byte-level BPE with one special token, which begins every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one row of token ids [tokens]."""
    return torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenizer and rows of token ids [tokens]."""

    tokenizer: Tokenizer
    training: torch.Tensor
    held_out: torch.Tensor

    def held_out_windows(self, window: int) -> torch.Tensor:
        """[windows, window] The beginning of the held-out texts, in 64 windows at most."""
        return self.held_out[: len(self.held_out) // window * window].view(-1, window)[:64]


def read_data(files: int, vocabulary_size: int, from_target: Path | None) -> Data:
    """Read the sources, take the target's tokenizer or train one on them, and encode them."""
    training_texts, held_out_texts = read_sources(files)
    if from_target is not None:
        tokenizer = Tokenizer.from_file(str(from_target / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(training_texts, vocabulary_size)
    data = Data(tokenizer, encode(tokenizer, training_texts), encode(tokenizer, held_out_texts))
    files_read = f"{len(training_texts)} files and {len(held_out_texts)} held out"
    print(f"{files_read}, {len(data.training) / 1e6:.1f} M tokens")
    return data


def build(shape: Shape, vocabulary_size: int, device: str) -> LlamaForCausalLM:
    """A model with random weights in float32."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).to(device)


def optimizers(model: nn.Module, layers: Iterable[nn.Module]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of some layers, AdamW for the rest."""
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """Share of the full learning rate at `progress` in [0, 1]: short warm-up, constant, linear to zero."""
    return min(1.0, progress / 0.02 + 0.05, max(0.0, (1.0 - progress) / 0.5))


def batches(tokens: torch.Tensor, batch: int, window: int, device: str) -> Iterator[torch.Tensor]:
    """Random windows [batch, window] of a row of tokens, for ever."""
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(window)
    while True:
        starts = torch.randint(len(tokens) - window, (batch, 1), generator=generator)
        yield tokens[starts + offsets].to(device)


def language_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of the next token."""
    logits = model(windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def distillation_loss(target: LlamaForCausalLM) -> Loss:
    """Forward KL divergence from the target's distribution to the draft's."""

    def loss(draft: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_logprobs = F.log_softmax(target(windows[:, :-1]).logits.flatten(0, 1), -1)
        draft_logprobs = F.log_softmax(draft(windows[:, :-1]).logits.flatten(0, 1), -1)
        return F.kl_div(draft_logprobs, target_logprobs, log_target=True, reduction="batchmean")

    return loss


def train(
    model: nn.Module,
    chosen: Sequence[torch.optim.Optimizer],
    data: Iterator[torch.Tensor],
    loss_of: Loss,
    minutes: float,
) -> None:
    """Train for a time, printing progress about twenty times."""
    model.train()
    full_rates = [group["lr"] for optimizer in chosen for group in optimizer.param_groups]
    start, told, step = time.monotonic(), 0.0, 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1.0:
        groups = [group for optimizer in chosen for group in optimizer.param_groups]
        for group, full_rate in zip(groups, full_rates, strict=True):
            group["lr"] = full_rate * rate(progress)
        loss = loss_of(model, next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if progress >= told:
            print(f"  {progress:4.0%}  step {step}  loss {loss.item():.3f}", flush=True)
            told = progress + 0.05
    model.eval()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, windows: torch.Tensor) -> tuple[float, float]:
    """Loss in windows, and share of positions whose best token is the next one."""
    logits = model(windows[:, :-1]).logits.flatten(0, 1)
    following = windows[:, 1:].flatten()
    top_1 = (logits.argmax(-1) == following).float().mean().item()
    return F.cross_entropy(logits, following).item(), top_1


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint in bfloat16 with its tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--minutes", type=float, default=55.0, help="training time of the target")
    parser.add_argument("--draft-minutes", type=float, default=60.0, help="training time of the draft")
    parser.add_argument("--from-target", type=Path, help="folder of a trained target to distil from")
    parser.add_argument("--target", choices=SHAPES, default="small", help="shape of the target")
    parser.add_argument("--draft", choices=SHAPES, default="draft", help="shape of the draft")
    parser.add_argument("--vocabulary", type=int, default=4096, help="entries of the tokenizer")
    parser.add_argument("--files", type=int, default=100_000, help="most source files to read")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--window", type=int, default=256, help="tokens per window")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def trainer_flags(
    documentation: str | None, *, out: str, minutes: float, steps: int
) -> argparse.ArgumentParser:
    """A parser with the flags of the scripts that train `out` for a target."""
    parser = new_parser(documentation)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {out}")
    parser.add_argument("--minutes", type=float, default=minutes, help="total training time")
    parser.add_argument("--steps", type=int, default=steps, help="own steps that each row is trained for")
    parser.add_argument("--files", type=int, default=800, help="most source files to read")
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--window", type=int, default=128, help="tokens per window")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser


def train_and_judge(
    name: str, model: LlamaForCausalLM, loss_of: Loss, minutes: float, data: Data, flags: argparse.Namespace
) -> None:
    """Train one model and print its held-out figures."""
    print(f"{name}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters")
    windows = batches(data.training, flags.batch, flags.window, flags.device)
    train(model, optimizers(model, model.model.layers), windows, loss_of, minutes)
    loss, top_1 = evaluate(model, data.held_out_windows(flags.window).to(flags.device))
    print(f"{name}: held-out loss {loss:.3f}, perplexity {math.exp(loss):.1f}, top-1 {top_1:.3f}")


def make_target(data: Data, flags: argparse.Namespace) -> LlamaForCausalLM:
    """The target: loaded if the flags name one, otherwise trained."""
    if flags.from_target is not None:
        return (
            LlamaForCausalLM.from_pretrained(flags.from_target, dtype=torch.float32).to(flags.device).eval()
        )
    target = build(SHAPES[flags.target], data.tokenizer.get_vocab_size(), flags.device)
    train_and_judge("target", target, language_loss, flags.minutes, data, flags)
    return target


def main() -> None:
    """Train both models and print their held-out figures."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    data = read_data(flags.files, flags.vocabulary, flags.from_target)
    target = make_target(data, flags)
    draft = build(SHAPES[flags.draft], data.tokenizer.get_vocab_size(), flags.device)
    train_and_judge("draft", draft, distillation_loss(target), flags.draft_minutes, data, flags)
    save(target, data.tokenizer, flags.out / "target")
    save(draft, data.tokenizer, flags.out / "draft")


if __name__ == "__main__":
    main()
