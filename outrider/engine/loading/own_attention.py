"""Models whose modules compute attention themselves, not through transformers' attention interface.

For each such module there is a function here that makes queries, keys and values as the module does and hands
them to a function of that interface. It takes the place of the module's `forward`, or of `_attn` where the
module has a method for attention alone.

With ALiBi a score has slope · position of the key added to it, with a slope for each head. (Press, Smith and
Lewis 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation".) A key
carries that in two more columns: the product of query and key then has it, and no attention needs to know.

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

_THEIRS = ("eager", "sdpa")
"""Attention that the modules compute themselves."""
_FACTOR = 64.0
"""Of a query's columns for ALiBi: float16 then holds those of keys at 65536 positions."""

Mix = Callable[..., Tensor]
"""Takes a module, its query [1, Q, N, D], key and value [1, H, N, ...], and options: [1, N, Q, V]."""


def has_known_attention(network: PreTrainedModel) -> bool:
    """Whether modules of the model compute attention themselves, in a way that is known here."""
    return bool(_modules(network))


def uses_alibi(network: PreTrainedModel) -> bool:
    """Whether the keys of such a model carry their positions."""
    return network.config.model_type in ("bloom", "mpt") or bool(getattr(network.config, "alibi", False))


def set_attention(network: PreTrainedModel, name: str) -> None:
    """Make the model compute with this function of transformers' attention interface; with the name that its
    configuration had at first it computes as at first."""
    modules = _modules(network)
    if not modules:
        network.set_attn_implementation(name)
        return
    network.config._attn_implementation = name
    functions: Any = AttentionInterface()  # type: ignore[no-untyped-call]
    mix = None if name in _THEIRS else partial(_mix, functions[name], _alibi(network))
    for module in modules:
        place, compute = _KNOWN[type(module).__name__]
        vars(module).pop(place, None)
        if mix is not None:
            setattr(module, place, partial(compute, module, mix))


def _modules(network: PreTrainedModel) -> list[Any]:
    """Those that are known here; code that comes with a model may have others of the same name."""
    return [
        module
        for module in network.modules()
        if type(module).__name__ in _KNOWN and type(module).__module__.startswith("transformers.models.")
    ]


class _Alibi:
    """What the keys of a forward carry, noted before it begins.

    The slopes, and where products are rounded to the model's dtype, are those of transformers.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        config, modeling = network.config, sys.modules[type(network).__module__]
        self._is_mpt, self._is_falcon = config.model_type == "mpt", config.model_type == "falcon"
        heads, device = config.num_attention_heads, network.device
        self._dtype = network.dtype
        self._width = config.hidden_size // heads
        if self._is_mpt:  # from -1 to 0
            slopes = -modeling.build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]
        else:  # from 0 to 1
            mask = torch.ones((1, 2), dtype=torch.int64, device=device)
            slopes = modeling.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
        self._slopes = slopes.bfloat16() if self._is_falcon else slopes
        self._added = torch.empty(0)
        network.register_forward_pre_hook(self._note, with_kwargs=True)

    def columns(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """The query [1, Q, N, D] and the key with two columns more each; two hold more digits than one."""
        exact = self._added / (scaling * _FACTOR)
        first = exact.to(key.dtype)
        both = torch.stack([first, (exact - first).to(key.dtype)], -1)
        factors = query.new_full((*query.shape[:-1], 2), _FACTOR)
        return torch.cat([query, factors], -1), torch.cat([key, both[None]], -1)

    def _note(self, _: Any, args: Any, options: dict[str, Any]) -> Any:
        """Of a forward of packed tokens, which says their positions: [Q, N] float32 is added to scores."""
        if (positions := options.get("position_ids")) is None:
            return None
        added = self._slopes[:, None] * positions
        if not self._is_mpt:
            added = added.to(self._dtype)
        self._added = (added / self._width**0.5 if self._is_falcon else added).float()
        options = {
            name: given for name, given in options.items() if name != "position_ids" or self._is_falcon
        }
        if self._is_mpt:  # it needs some mask, and takes one of four axes as it is
            options["attention_mask"] = torch.zeros((1, 1, 1, 1), device=positions.device)
        return args, options


def _alibi(network: Any) -> _Alibi | None:
    """The same one at each call, as it listens to the model's forwards."""
    if uses_alibi(network) and not hasattr(network, "noted_alibi"):
        network.noted_alibi = _Alibi(network)
    return getattr(network, "noted_alibi", None)


def _mix(
    attend: Any, alibi: _Alibi | None, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    if alibi is not None:
        query, key = alibi.columns(query, key, options["scaling"])
    mixed: Tensor = attend(module, query, key, value, None, **options)[0]
    return mixed


def _scored(
    module: Any, mix: Mix, query: Tensor, key: Tensor, value: Tensor, _: Any = None
) -> tuple[Tensor, None]:
    """CodeGen turns queries and keys in float32."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return mix(module, query, key, value, scaling=query.shape[-1] ** -0.5).transpose(1, 2), None


def _gpt_neo(
    module: Any, mix: Mix, query: Tensor, key: Tensor, value: Tensor, _: Any = None
) -> tuple[Tensor, None]:
    module.layer_idx = module.layer_id
    window = module.config.window_size if module.attention_type == "local" else None
    return mix(module, query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None


def _apart(fused: Tensor, groups: int, width: int) -> list[Tensor]:
    """Queries, keys and values [1, heads, N, D] of rows in which those of a kv head follow each other."""
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


def _xglm(module: Any, mix: Mix, rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    made = (each(rows) for each in (module.q_proj, module.k_proj, module.v_proj))
    parts = [rows.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for rows in made]
    return module.out_proj(mix(module, *parts, scaling=module.scaling).flatten(2)), None


_KNOWN: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _scored),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _scored),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _scored),
    "MptAttention": ("forward", _mpt),
    "XGLMAttention": ("forward", _xglm),
}
"""Modules, what of them is replaced, and by what."""
