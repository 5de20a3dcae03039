"""Makes models with random weights on the device for benchmarks/gpu.py and gpu_services.py, and their steps.

Random models of two shapes never agree, so the pair that is served is made from one: the draft is the
target's first layers with its output layer, and the target's other layers are damped until both choose the
same token at a given share of positions. That says nothing about real models; it makes acceptance real
(seen, not assumed), and target and draft cost what models of their sizes cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.fused_decoder import fused_decoder
from outrider.engine.gpu.layout import BufferLayout, DeviceStep
from outrider.engine.gpu.plan import fill, plan_tiles
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.check_forward import check_paged, run_plain
from outrider.engine.make_runner import without_kernels
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import SamplingRow
from outrider.sampling.history import History

DRAFT_LAYERS = 4
"""The target's first layers that are the draft of the served pair: with the output layer 1.4 B of 8 B
parameters."""
AGREEMENT = 0.8
"""Share of positions at which the draft of that pair chooses the target's token."""
CHUNK = 512
"""Tokens of a piece of a prompt."""
NOTHING = History([])


def llama(shape: str) -> LlamaConfig:
    """The configuration of a shape: 8b (Llama 3 8B), 1b (Llama 3.2 1B), or tiny, for trying the script."""
    sizes: dict[str, dict[str, Any]] = {
        "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
               "num_attention_heads": 32, "head_dim": 128, "vocab_size": 128256},
        "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
               "num_attention_heads": 32, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
        "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
                 "num_attention_heads": 4, "head_dim": 16, "vocab_size": 500, "num_key_value_heads": 2},
    }  # fmt: skip
    return LlamaConfig(
        **{"num_key_value_heads": 8, **sizes[shape]},
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def random_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with random weights, drawn on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            network = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    network.requires_grad_(False).train(False)
    return network


@torch.inference_mode()
def make_agree(target: LlamaForCausalLM, layers: int) -> float:
    """Damp what the layers after the first `layers` add until the whole target and a draft of the first ones
    alone agree at AGREEMENT of positions; return the agreement."""
    vocabulary, device = target.config.vocab_size, target.device
    tokens = torch.randint(vocabulary, (4, 128), generator=torch.Generator().manual_seed(1)).to(device)
    seen = target.model(tokens, use_cache=False, output_hidden_states=True).hidden_states[layers]
    guessed = target.lm_head(target.model.norm(seen)).argmax(-1)
    outputs = [
        weight
        for layer in list(target.model.layers)[layers:]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]
    originals = [weight.clone() for weight in outputs]
    low, high, agreed = 0.0, 1.0, 0.0
    for _ in range(10):
        damping = (low + high) / 2
        for weight, original in zip(outputs, originals, strict=True):
            weight.copy_(original * damping)
        chosen = target(tokens, use_cache=False).logits.argmax(-1)
        agreed = float((chosen == guessed).float().mean())
        low, high = (damping, high) if agreed > AGREEMENT else (low, damping)
    return agreed


def loaded_from(network: LlamaForCausalLM, name: str) -> LoadedModel:
    """The model as the engine runs it.

    Raises:
        ModelError: the engine computes something else.
    """
    limit = network.config.max_position_embeddings
    plain = run_plain(network, limit)
    loaded = LoadedModel(
        model=fused_decoder(network, plain.geometry, plain.windows, plain.observed),
        name=name,
        vocabulary_size=network.config.vocab_size,
        context_length=limit,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=network.dtype,
        device=network.device,
        geometry=plain.geometry,
        kernels=without_kernels(plain.geometry, network.dtype, network.device) is None,
    )
    check_paged(loaded, plain, 2.0)
    return loaded


def bytes_of_step(loaded: LoadedModel, context: int) -> int:
    """Bytes that a step must read: every weight but the embedding table's, and the keys and values."""
    decoder: Any = loaded.model
    norms = [
        decoder.norm,
        *(n for layer in decoder.stack for n in (layer.settings.input_norm, layer.settings.mlp_norm)),
    ]
    linears = [
        decoder.head,
        *(
            p
            for layer in decoder.stack
            for p in (layer.qkv, layer.output, layer.mlp.gate.gate_up, layer.mlp.down)
        ),
    ]
    weights = sum(part.weight.nbytes for part in (*norms, *linears))
    return int(weights + context * loaded.kv_bytes_per_token)


def committed(runner: ModelRunner, context: int) -> SequenceKv:
    """A sequence that claims `context` committed tokens, without computing them."""
    kv = SequenceKv.open(runner.pool, [])
    kv.reserve(context)
    kv.append([1] * context, None)
    kv.commit(range(context), [1] * context)
    return kv


def tree_segment(kv: SequenceKv, nodes: int) -> Segment:
    """The last committed token and a tree of `nodes` nodes below it, two children each."""
    parents = [-1, *((index - 1) // 2 for index in range(1, 1 + nodes))]
    return Segment(kv, [2] * (1 + nodes), parents, range(1 + nodes))


def open_step(runner: GraphRunner, segments: Sequence[Segment]) -> DeviceStep:
    """A planned step of segments that are appended, on the device."""
    plan = plan_tiles(segments, sum(len(each.tokens) for each in segments), runner.settings)
    layout = BufferLayout(plan.capacity)
    words = torch.from_numpy(fill(plan, layout, segments, [], runner.settings))
    return runner.attention.open_step(words.to(runner.loaded.device), layout, 1)


def greedy_rows(position: int, count: int, params: SamplingParams | None = None) -> list[SamplingRow]:
    """Rows of a chain that begins at a position."""
    params = params or SamplingParams()
    return [SamplingRow(params, position + index, index, NOTHING) for index in range(count)]


def prefilled(runner: ModelRunner, tokens: Sequence[int]) -> SequenceKv:
    """A sequence with these tokens committed."""
    kv = SequenceKv.open(runner.pool, [])
    for start in range(0, len(tokens), CHUNK):
        piece = list(tokens[start : start + CHUNK])
        runner.forward([Segment(kv, piece, None, [len(piece) - 1])])
        runner.commit(kv, range(len(piece)), piece)
    return kv
