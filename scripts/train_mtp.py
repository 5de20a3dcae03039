"""Train an MTP layer for the demo target, to measure one as a draft.

    python -m scripts.train_mtp --target models/demo/target --out out/mtp --minutes 15
    outrider up --target out/mtp --draft mtp

The result is the same target in the format of GLM 4.5, which has MTP layers: all of its own layers are dense,
and its logits are the same. The layer learns the target's distributions on the source of the Python standard
library, as the demo draft did: from the target's hidden states, and in further steps from its own results.

For targets like Llama without biases, folders with one file of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpModel

from scripts.train_demo_pair import batches, read_data, train, trainer_flags
from scripts.widen import copy_tokenizer

STEP_WEIGHT = 0.8
"""Weight of a step's loss, relative to that of the step before."""
RATE = 2e-3
EXPERTS = 2
"""Experts of the layer, of which a token goes through one: a layer of GLM 4.5 has some."""


class Teacher(nn.Module):
    """The target and its MTP layer over B windows of T tokens. Row t of step s has the embedding of token t +
    s + 1, and for s = 0 the target's hidden state of token t, otherwise the result of the step before."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.target: Any = target.eval().requires_grad_(False)
        self.layer: Any = MtpModel(target, 1).layers[0]
        for weight in self.layer.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, 0.0, 0.02)
        width = target.config.hidden_size
        with torch.no_grad():  # it begins with the target's hidden state
            self.layer.eh_proj.weight[:, width:] += torch.eye(width)

    def forward(self, windows: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
        """windows [B, T] -> for each step the layer's logits and the target's log probabilities, [B, T -
        steps - 1, V]."""
        with torch.no_grad():
            said = self.target(windows, output_hidden_states=True)
        rows = windows.shape[1] - steps - 1
        hidden, wanted = said.hidden_states[-1][:, :rows], said.logits.log_softmax(-1)
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()
        found = []
        for step in range(1, steps + 1):
            embedded = self.target.get_input_embeddings()(windows[:, step : step + rows])
            places = torch.arange(step, step + rows)[None]
            turn = self.target.get_decoder().rotary_emb(embedded, position_ids=places)
            hidden = self.layer(
                embedded,
                hidden,
                position_embeddings=turn,
                attention_mask=mask,
                position_ids=places,
                past_key_values=None,
            )
            found.append((self.target.lm_head(hidden), wanted[:, step : step + rows]))
        return found


def loss_of(model: Teacher, windows: Tensor, steps: int) -> Tensor:
    """Forward KL divergence from the target's distributions to the layer's, over all steps."""
    total = torch.zeros(())
    for step, (logits, wanted) in enumerate(model(windows, steps)):
        parts = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True)
        total = total + STEP_WEIGHT**step * parts.sum(-1).mean()
    return total


@torch.no_grad()
def agreement(model: Teacher, windows: Tensor, steps: int) -> list[float]:
    """For each step, the share of rows whose best token is the target's."""
    return [
        (said.argmax(-1) == wanted.argmax(-1)).float().mean().item() for said, wanted in model(windows, steps)
    ]


def save_as_glm(target: Path, folder: Path) -> None:
    """Write the same target in the format of GLM 4.5, in bfloat16."""
    llama = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    names += ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    given = {name: getattr(llama.config, name) for name in names}
    config = Glm4MoeConfig(
        **given,
        rope_parameters={**llama.config.rope_parameters, "partial_rotary_factor": 1.0},
        first_k_dense_replace=given["num_hidden_layers"],
        n_routed_experts=EXPERTS,
        num_experts_per_tok=1,
        moe_intermediate_size=given["intermediate_size"],
    )
    glm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    glm.load_state_dict(llama.state_dict())
    glm.save_pretrained(folder)
    copy_tokenizer(target, folder)


def add_layer(layer: nn.Module, folder: Path, number: int) -> None:
    """Add an MTP layer to a checkpoint, as its layer of this number, under the names of GLM 4.5."""
    path, added = folder / "model.safetensors", {}
    for name, tensor in layer.state_dict().items():
        weight = tensor.to(torch.bfloat16).contiguous()
        place = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        added |= _experts(place, weight) if ".experts." in place else {place: weight}
    named = {f"model.layers.{number}.{place}": weight for place, weight in added.items()}
    save_file(load_file(path) | named, path, {"format": "pt"})


def _experts(place: str, stacked: Tensor) -> dict[str, Tensor]:
    """Weights of all experts -> those of each, gate and up apart."""
    before, _, kind = place.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return {
        f"{before}.{expert}.{part}.weight": own.contiguous()
        for expert, weight in enumerate(stacked)
        for part, own in zip(parts, weight.chunk(len(parts)), strict=True)
    }


def main() -> None:
    """Train a layer, say how often it agrees with its target, and save both."""
    flags = trainer_flags(__doc__, out="the target with its MTP layer", minutes=15.0, steps=2).parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    data = read_data(flags.files, 0, flags.target)
    save_as_glm(flags.target, flags.out)
    model = Teacher(flags.out)
    print(f"layer: {sum(weight.numel() for weight in model.layer.parameters()) / 1e6:.2f} M parameters")
    chosen = [torch.optim.AdamW(model.layer.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    windows = batches(data.training, flags.batch, flags.window, "cpu")
    train(model.layer, chosen, windows, lambda _, some: loss_of(model, some, flags.steps), flags.minutes)
    held_out = data.held_out_windows(flags.window)
    shares = " ".join(f"{share:.3f}" for share in agreement(model, held_out, flags.steps))
    print(f"agrees with the target in held-out text, by step: {shares}")
    add_layer(model.layer, flags.out, model.target.config.num_hidden_layers)


if __name__ == "__main__":
    main()
