"""Train an EAGLE-3 head for a target: a draft of one layer that reads the outputs of some of the target's
layers.

    python -m scripts.train_eagle --target models/demo/target --out out/eagle --minutes 12

The head learns the target's distributions on the source of the Python standard library, as the demo draft
did. Each of its `--steps` reads the output of the step before at the same position, as in drafting (Li and
others 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"). It
begins as a copy of the target's last layer and proposes the `--draft-vocabulary` most frequent tokens.

For Llama-like targets, folders with one file of weights.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from scripts.train_demo_pair import Data, batches, optimizers, read_data, train, trainer_flags

STEP_WEIGHT = 0.8
"""Weight of a step's loss, relative to that of the step before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the head reads and proposes: the target layers whose outputs it reads, and its tokens."""

    layers: tuple[int, ...]
    """The target's layers, counted from 0."""
    tokens: Tensor
    """[draft vocabulary] The target's ids of the tokens that the head proposes, ascending."""


class Attention(nn.Module):
    """Projects embedding and feature, side by side, to queries, keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, self.heads * head, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, 2 C] -> queries, keys, values [B, heads, T, D]; keys and values are repeated for all
        queries that share them."""

        def heads(linear: nn.Module, count: int) -> Tensor:
            return linear(x).unflatten(-1, (count, -1)).transpose(1, 2)

        repeats = self.heads // self.kv_heads
        values = heads(self.v_proj, self.kv_heads)
        queries, keys = apply_rotary_pos_emb(
            heads(self.q_proj, self.heads), heads(self.k_proj, self.kv_heads), *turn
        )
        return queries, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)


class Layer(nn.Module):
    """The head's one layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))


class Head(nn.Module):
    """The head, with the parameter names of its checkpoint, over B windows of T rows. Row t holds the feature
    of token t and the embedding of the next token. In step s, it holds those at the end of a chain of s
    features of the head's own that follows row t."""

    def __init__(self, config: LlamaConfig, plan: Plan) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(plan.layers) * width, width, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(plan.tokens), bias=False)
        self._turns = LlamaRotaryEmbedding(config)

    def forward(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """features [B, T, layers C], embedded [B, T + steps, C] of tokens 0 to T + steps - 1 -> logits
        [B, T, draft vocabulary] of every step."""
        layer, rows = self.midlayer, features.shape[1]
        hidden, found = self.fc(features), []
        keys, values = [], []
        for step in range(steps):
            token = layer.input_layernorm(embedded[:, step + 1 : step + 1 + rows])
            x = torch.cat([token, layer.hidden_norm(hidden)], -1)
            places = torch.arange(step, step + rows)[None]
            query, key, value = layer.self_attn(x, self._turns(x, places))
            keys.append(key)
            values.append(value)
            mixed = below_the_text(query, keys, values).transpose(1, 2).flatten(2)
            hidden = hidden + layer.self_attn.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
        return found


def below_the_text(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention output [B, heads, T, D] of a step's rows, over the text up to row t and the chain of the
    head's own steps after it."""
    scale, rows = query.shape[-1] ** -0.5, query.shape[2]
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    chain = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    shares = torch.cat([scores, *chain], -1).softmax(-1)
    mixed = shares[..., :rows] @ values[0]
    for place, value in enumerate(values[1:], rows):
        mixed = mixed + shares[..., place : place + 1] * value
    return mixed


class Teacher:
    """The target, which computes features and the next tokens' logits."""

    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        self.model = (
            LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        )
        self.config: LlamaConfig = self.model.config
        self._layers = layers

    @torch.no_grad()
    def __call__(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """windows [B, W] -> features [B, W, layers C], embeddings [B, W, C], logits [B, W, V]."""
        output = self.model(windows, output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[layer + 1] for layer in self._layers], -1)
        return features, output.hidden_states[0], output.logits


def start_from(head: Head, teacher: Teacher, plan: Plan) -> None:
    """Initialize the head as the target's last layer, which reads the last of the features; training adds the
    use of the embedding."""
    last, weights = teacher.model.model.layers[-1], head.midlayer
    width = teacher.config.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(weights.self_attn, name).weight
            own[:, width:] = getattr(last.self_attn, name).weight
        weights.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        weights.mlp.load_state_dict(last.mlp.state_dict())
        weights.hidden_norm.weight.copy_(last.input_layernorm.weight)
        weights.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(teacher.model.model.norm.weight)
        head.lm_head.weight.copy_(teacher.model.lm_head.weight[plan.tokens])
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -width:] += torch.eye(width)


def most_frequent(tokens: Tensor, count: int, vocabulary_size: int) -> Tensor:
    """The ids of the `count` most frequent tokens, ascending."""
    found = torch.bincount(tokens, minlength=vocabulary_size).topk(count).indices
    return found.sort().values


def loss_of(head: Head, teacher: Teacher, windows: Tensor, plan: Plan, steps: int) -> Tensor:
    """Cross-entropy with the target's distribution, over all steps, for windows [B, W]."""
    features, embedded, said = teacher(windows)
    rows = windows.shape[1] - steps
    total, weight = torch.zeros(()), 1.0
    shares = said.softmax(-1)[..., plan.tokens]
    for step, found in enumerate(head(features[:, :rows], embedded, steps)):
        wanted = shares[:, step + 1 : step + 1 + found.shape[1]]
        total = total - weight * (wanted * found.log_softmax(-1)).sum(-1).mean()
        weight *= STEP_WEIGHT
    return total


@torch.no_grad()
def agreement(head: Head, teacher: Teacher, windows: Tensor, plan: Plan, steps: int) -> list[float]:
    """For each step, the share of rows whose best token is the target's."""
    features, embedded, said = teacher(windows)
    rows = windows.shape[1] - steps
    logits = head(features[:, :rows], embedded, steps)
    best = said.argmax(-1)
    return [
        (plan.tokens[found.argmax(-1)] == best[:, step + 1 : step + 1 + rows]).float().mean().item()
        for step, found in enumerate(logits)
    ]


def save_head(head: Head, plan: Plan, config: LlamaConfig, folder: Path) -> None:
    """Write a checkpoint in the format of SpecForge, which SGLang reads: bfloat16, without the embedding."""
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[plan.tokens] = True
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    weights |= {"d2t": plan.tokens - torch.arange(len(plan.tokens)), "t2d": t2d}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size", "hidden_act")
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(plan.tokens),
        "target_hidden_size": config.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(plan.layers), "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **{name: getattr(config, name) for name in kept},
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def parse() -> argparse.Namespace:
    """The flags."""
    parser = trainer_flags(__doc__, out="the head", minutes=12.0, steps=3)
    parser.add_argument(
        "--layers", default="", help="target layers that are read, as 0,2,4; empty: low, mid, high"
    )
    parser.add_argument("--draft-vocabulary", type=int, default=2048, help="tokens that the head proposes")
    return parser.parse_args()


def make_plan(flags: argparse.Namespace, data: Data) -> Plan:
    """The plan: the layers that the flags name, or else low, middle and high ones, and frequent tokens."""
    config = LlamaConfig.from_pretrained(flags.target)
    count = config.num_hidden_layers
    layers = tuple(int(layer) for layer in flags.layers.split(",") if layer) or (0, count // 2 - 1, count - 2)
    size = min(flags.draft_vocabulary, config.vocab_size)
    tokens = most_frequent(data.training, size, config.vocab_size)
    known = torch.isin(data.held_out, tokens).float().mean().item()
    print(f"reads layers {layers}; {size} tokens are {known:.1%} of the held-out text")
    return Plan(layers, tokens)


def main() -> None:
    """Train a head, say how often it agrees with its target, and save it."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    data = read_data(flags.files, 0, flags.target)
    plan = make_plan(flags, data)
    teacher = Teacher(flags.target, plan.layers)
    head = Head(teacher.config, plan)
    start_from(head, teacher, plan)
    print(f"head: {sum(weight.numel() for weight in head.parameters()) / 1e6:.2f} M parameters", flush=True)
    windows = batches(data.training, flags.batch, flags.window, "cpu")
    chosen = optimizers(head, [head.fc, head.midlayer])

    def loss(_: Head, some: Tensor) -> Tensor:
        return loss_of(head, teacher, some, plan, flags.steps)

    train(head, chosen, windows, loss, flags.minutes)
    shares = agreement(head, teacher, data.held_out_windows(flags.window), plan, flags.steps)
    print("agrees with the target in held-out text, by step: " + " ".join(f"{share:.3f}" for share in shares))
    save_head(head, plan, teacher.config, flags.out)


if __name__ == "__main__":
    main()
