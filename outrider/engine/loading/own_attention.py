"""Models whose modules compute attention themselves, not through transformers' attention interface.

For each such module there is a function here that computes queries, keys and values as the module does and
passes them to a function of that interface. It replaces the module's `forward`, or `_attn` where the module
has a method only for attention.

Shapes: N packed tokens, one batch; Q query heads, H kv heads, D and V widths of keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from outrider.engine.loading.alibi import Alibi, alibi_of

_THEIRS = ("eager", "sdpa")
"""Names of the attention that the modules compute themselves."""
Mix = Callable[..., Tensor]
"""Takes a module, its query [1, Q, N, D], key and value [1, H, N, ...], and options; returns [1, N, Q, V]."""


def has_known_attention(network: PreTrainedModel) -> bool:
    """True if modules of the model compute attention themselves, in a way that is known here."""
    return bool(_modules(network))


def set_attention(network: PreTrainedModel, name: str) -> None:
    """Make the model compute with this function of transformers' attention interface. The name that its
    configuration had at first restores its own attention."""
    modules = _modules(network)
    if not modules:
        network.set_attn_implementation(name)
        return
    network.config._attn_implementation = name
    functions: Any = AttentionInterface()  # type: ignore[no-untyped-call]
    mix = None if name in _THEIRS else partial(_mix, functions[name], alibi_of(network))
    for module in modules:
        place, compute = _KNOWN[type(module).__name__]
        vars(module).pop(place, None)
        if mix is not None:
            setattr(module, place, partial(compute, module, mix))


def _modules(network: PreTrainedModel) -> list[Any]:
    """Return the modules that are known here. Code that comes with a model may have others of the same
    name."""
    return [
        module
        for module in network.modules()
        if type(module).__name__ in _KNOWN and type(module).__module__.startswith("transformers.models.")
    ]


def _mix(
    attend: Any, alibi: Alibi | None, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    if alibi is not None:
        each = query.shape[1] // key.shape[1]  # each query head has its own slope
        key, value = (part.repeat_interleave(each, 1) for part in (key, value))
        query, key = alibi.columns(query, key, options["scaling"])
    mixed: Tensor = attend(module, query, key, value, None, **options)[0]
    return mixed


def _scored(
    module: Any, mix: Mix, query: Tensor, key: Tensor, value: Tensor, _: Any = None
) -> tuple[Tensor, None]:
    """CodeGen rotates queries and keys in float32."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return mix(module, query, key, value, scaling=query.shape[-1] ** -0.5).transpose(1, 2), None


def _gpt_neo(
    module: Any, mix: Mix, query: Tensor, key: Tensor, value: Tensor, _: Any = None
) -> tuple[Tensor, None]:
    module.layer_idx = module.layer_id
    window = module.config.window_size if module.attention_type == "local" else None
    return mix(module, query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None


def _apart(fused: Tensor, groups: int, width: int) -> list[Tensor]:
    """Return queries, keys and values [1, heads, N, D] from rows in which those of each kv head follow each
    other."""
    heads = fused.view(*fused.shape[:2], groups, -1, width)
    parts = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    return [part.transpose(1, 2) for part in parts]


def _bloom(module: Any, mix: Mix, rows: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    parts = _apart(module.query_key_value(rows), module.num_heads, module.head_dim)
    mixed = mix(module, *parts, scaling=module.head_dim**-0.5)
    return residual + module.dense(mixed.flatten(2)), None


def _falcon(
    module: Any, mix: Mix, rows: Tensor, alibi: Any, *_: Any, position_embeddings: Any, **__: Any
) -> tuple[Tensor, None]:
    query, key, value = _apart(module.query_key_value(rows), module.num_kv_heads, module.head_dim)
    if alibi is None:
        turn = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = turn(query, key, *position_embeddings)
    mixed = mix(module, query, key, value, scaling=module.head_dim**-0.5)
    return module.dense(mixed.flatten(2)), None


def _mpt(module: Any, mix: Mix, rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(rows)
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    parts = fused.view(*rows.shape[:2], 3, module.n_heads, -1).permute(2, 0, 3, 1, 4)
    return module.out_proj(mix(module, *parts, scaling=module.softmax_scale).flatten(2)), None


def _diffllama(
    module: Any, mix: Mix, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """The module mixes two halves of its values with the same weights; here they lie side by side."""
    made = (each(hidden_states) for each in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (rows.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for rows in made)
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    both = torch.cat([half.repeat(1, 2, 1, 1) for half in value.chunk(2, 1)], -1)
    first, second = mix(module, query, key, both, scaling=module.scaling).chunk(2, 2)
    given = (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)
    grown, other = ((q * k).sum(dtype=torch.float32).exp().to(query.dtype) for q, k in given)
    rows = module.groupnorm(first - (grown - other + module.lambda_init) * second)
    return module.o_proj(((1 - module.lambda_init) * rows).flatten(2)), None


def _xglm(module: Any, mix: Mix, rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    made = (each(rows) for each in (module.q_proj, module.k_proj, module.v_proj))
    parts = [rows.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for rows in made]
    return module.out_proj(mix(module, *parts, scaling=module.scaling).flatten(2)), None


_KNOWN: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _scored),
    "DiffLlamaAttention": ("forward", _diffllama),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _scored),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _scored),
    "MptAttention": ("forward", _mpt),
    "XGLMAttention": ("forward", _xglm),
}
"""Names of modules, the method that is replaced, and the function that replaces it."""
