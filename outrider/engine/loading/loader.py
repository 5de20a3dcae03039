"""Loads a decoder-only model and makes sure that this engine computes what the model computes.

`load_model` goes: settings -> support -> weights -> fused decoder -> packing -> self check. Whatever is
wrong ends in a ModelError with one sentence, before a port is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.engine.cpu.backend import AUTO
from outrider.engine.cpu.choice import choose_backend
from outrider.engine.cpu.int8 import quantize_linears
from outrider.engine.cpu.linear import is_linear, linear_weight, pack_linears
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.gpu.accelerator import kernel_errors
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.check_determinism import check_determinism
from outrider.engine.loading.check_forward import TOLERANCE, Plain, check_paged, run_plain
from outrider.engine.loading.layers import leave_out
from outrider.engine.loading.model_path import cannot_load, check_model_path
from outrider.engine.loading.move_weights import move_weights
from outrider.engine.make_runner import without_kernels
from outrider.protocol.errors import ModelError

FUSED_STRICTNESS = 2.0
"""How much nearer to the model's own results than `TOLERANCE` the fused decoder must be in 16 bits."""
_factory: Any = AutoModelForCausalLM  # its annotations leave out what the arguments below change
_LOAD_ERRORS = (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, SafetensorError)
"""What transformers raises for files that are missing, unreadable, too large or not a known model."""


def load_model(
    model: str,
    *,
    dtype: str,
    device: str,
    threads: int,
    context_length: int = 0,
    trust_remote_code: bool = False,
    fused: bool = True,
    deterministic: bool = False,
    helper_cores: Sequence[int] = (),
    cpu_backend: str = AUTO,
    skipped_layers: Collection[int] = (),
    int8: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model from a folder or hub id.

    `dtype` and `device` may be auto; `context_length` 0 is the model's own limit; without `fused`, or where
    that decoder does not fit, the model's own modules run. With `deterministic` a model is refused whose
    results depend on the batch. On the CPU a thread on each of `helper_cores` takes part in long steps, and
    `cpu_backend` is auto or one of `outrider.engine.cpu.backend`. The model is taken without
    `skipped_layers`, and with `int8` its weights are rounded to 8 bits.

    Raises:
        ModelError: it cannot be loaded, is of a kind that cannot run here, or fails the self check.
    """
    say = progress or (lambda _: None)
    check_model_path(model)
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place = _device(device)
    config = _read_config(model, trust_remote_code)
    _refuse_unsupported(model, config, trust_remote_code)
    limit = _context_length(config, context_length, say)
    say(f"loading the weights of {model}")
    network = _read_weights(model, dtype, place, trust_remote_code, say)
    if skipped_layers:
        leave_out(network, skipped_layers)
    say("checking the model against this engine")
    plain = run_plain(network, limit)
    loaded = _described(network, Path(model).name, plain, limit, place)
    loaded = _arranged(_with_kernels(loaded, say), network, plain, fused, say)
    if int8:
        loaded = _quantized(loaded, plain, say)
    del network  # a fused decoder's weights are its own, and freed as they are packed
    # The library's results depend on the batch, so it is no alternative then.
    loaded = _packed(loaded, WorkerPool(threads, helper_cores), cpu_backend, not deterministic, say)
    if not int8:
        check_paged(loaded, plain)
    if deterministic:
        say("checking that a token's bits do not depend on its batch")
        check_determinism(loaded)
    return loaded


def load_network(model: str, *, dtype: str, device: str, threads: int) -> PreTrainedModel:
    """The model as transformers runs it, for studies of its layers; arguments as of `load_model`.

    Raises:
        ModelError: it cannot be loaded.
    """
    check_model_path(model)
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return _read_weights(model, dtype, _device(device), trust_remote_code=False, say=lambda _: None)


def _described(
    network: PreTrainedModel, name: str, plain: Plain, limit: int, place: torch.device
) -> LoadedModel:
    return LoadedModel(
        model=network,
        name=name,
        vocabulary_size=plain.logits.shape[-1],
        context_length=limit,
        eos_token_ids=_eos_token_ids(network),
        bos_token_id=_generation_setting(network, "bos_token_id"),
        dtype=network.dtype,
        device=place,
        geometry=plain.geometry,
    )


def _with_kernels(loaded: LoadedModel, say: Callable[[str], None]) -> LoadedModel:
    """The model for a GPU's kernels, if it is on one that has them and they take it."""
    if loaded.device.type == "cpu":
        return loaded
    reason = without_kernels(loaded.geometry, loaded.dtype, loaded.device)
    if reason is not None:
        say(f"without kernels: {reason}; plain torch computes this model")
    return replace(loaded, kernels=reason is None)


def _arranged(
    loaded: LoadedModel, network: PreTrainedModel, plain: Plain, fused: bool, say: Callable[[str], None]
) -> LoadedModel:
    """The model as it runs here: fused if that computes the same, on kernels if those do."""
    made = _made_fused(loaded, network, plain, say) if fused else loaded
    if not loaded.kernels:
        return made
    try:
        check_paged(made, plain)
    except _misfits() as reason:
        say(f"without kernels: {reason}; plain torch computes this model")
        return _arranged(replace(loaded, kernels=False), network, plain, fused, say)
    return made


def _misfits() -> tuple[type[Exception], ...]:
    """What says that a model does not run in some way."""
    return (NotFused, ModelError, *kernel_errors())


def _made_fused(
    loaded: LoadedModel, network: PreTrainedModel, plain: Plain, say: Callable[[str], None]
) -> LoadedModel:
    """The model as a fused decoder if that computes the same, else as it is."""
    try:
        made = replace(loaded, model=fused_decoder(network, plain.geometry, plain.windows))
        check_paged(made, plain, FUSED_STRICTNESS)
    except _misfits() as reason:
        say(f"without the fused decoder: {reason}")
        return loaded
    return made


def _quantized(loaded: LoadedModel, plain: Plain, say: Callable[[str], None]) -> LoadedModel:
    """The model with weights of 8 bits, checked before: afterwards its results are others."""
    if loaded.device.type != "cpu":
        raise ModelError("weights: int8 runs on the CPU alone; leave it out, or set device to cpu")
    check_paged(loaded, plain)
    say(f"{quantize_linears(loaded.model)} linear layers with weights of 8 bits")
    return replace(loaded, int8=True)


def _packed(
    loaded: LoadedModel, workers: WorkerPool, wanted: str, measured: bool, say: Callable[[str], None]
) -> LoadedModel:
    """The model with packed linear layers, whose work the worker pool shares, on the CPU."""
    if loaded.device.type != "cpu":
        return loaded
    weights = [linear_weight(module) for module in loaded.model.modules() if is_linear(module)]
    choice = choose_backend(weights, wanted, measured=measured)
    del weights
    gates = loaded.model.gates if isinstance(loaded.model, FusedDecoder) else ()
    count = pack_linears(loaded.model, choice.backend, workers, gates)
    say(f"{count} linear layers on {choice.backend}: {choice.reason}")
    return replace(loaded, choice=choice, workers=workers)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device: {device!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ModelError(f"device: {device!r} asked for and {found} CUDA devices found; use cpu or auto")
    return place


def _read_config(model: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except _LOAD_ERRORS as error:
        raise _cannot_load(model, error) from error
    return config


def _refuse_unsupported(model: str, config: PretrainedConfig, trust_remote_code: bool) -> None:
    """Refuse what cannot run here, seen from a model without weights."""
    if config.is_encoder_decoder:
        raise ModelError(f"model: {model!r} is an encoder-decoder; use a decoder-only model")
    try:
        with torch.device("meta"):
            skeleton = _factory.from_config(config, trust_remote_code=trust_remote_code)
    except _LOAD_ERRORS as error:
        raise _cannot_load(model, error) from error
    kind = type(skeleton).__name__
    other_layers = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if getattr(skeleton, "_is_stateful", False) or other_layers:
        raise ModelError(
            f"model: {kind} has layers ({', '.join(sorted(other_layers)) or 'recurrent'}) whose state cannot "
            "be rolled back; use a model with attention in every layer"
        )
    if not getattr(skeleton, "_supports_attention_backend", False):
        raise ModelError(
            f"model: {kind} does not let its attention be replaced (transformers' attention interface); "
            "use another architecture"
        )


def _read_weights(
    model: str, dtype: str, place: torch.device, trust_remote_code: bool, say: Callable[[str], None]
) -> PreTrainedModel:
    try:
        network, info = _from_files(model, dtype, trust_remote_code)
        move_weights(network, place, say)
    except _LOAD_ERRORS as error:
        raise _without_safetensors(model, error) or _cannot_load(model, error) from error
    missing = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if missing:
        raise ModelError(
            f"model: {model!r} lacks {len(missing)} weights of {type(network).__name__}, such as "
            f"{missing[0]}; use a checkpoint with a language-model head"
        )
    if network.dtype not in TOLERANCE:
        raise ModelError(f"dtype: weights of {network.dtype} cannot run here; set float32 or bfloat16")
    network.requires_grad_(False)
    evaluated: PreTrainedModel = network.eval()
    return evaluated


def _from_files(model: str, dtype: str, trust_remote_code: bool) -> Any:
    """The model on the CPU, and what transformers says of its weights."""
    return _factory.from_pretrained(
        model,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        use_safetensors=True,  # other formats are pickles: opening one runs what is in it
    )


def _context_length(config: PretrainedConfig, asked: int, say: Callable[[str], None]) -> int:
    """The most tokens of a sequence: the model's limit, less where its rotation changes with the length."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        if not asked:
            raise ModelError("context_length: config.json of the model names none; set one")
        return asked
    for rope in _rope_settings(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original is not None and original < limit:
            say(f"context cut from {limit} to {original} tokens: this rope changes all positions beyond it")
            limit = original
    if asked > limit:
        raise ModelError(f"context_length: {asked} is more than the {limit} of the model; lower it")
    return int(asked or limit)


def _rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Rotary settings: one set, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def _eos_token_ids(network: PreTrainedModel) -> tuple[int, ...]:
    ids = _generation_setting(network, "eos_token_id")
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _generation_setting(network: PreTrainedModel, name: str) -> Any:
    """A token id from generation_config.json, else from config.json."""
    generation: GenerationConfig | None = network.generation_config
    value = getattr(generation, name, None)
    return value if value is not None else getattr(network.config.get_text_config(), name, None)


def _without_safetensors(model: str, error: Exception) -> ModelError | None:
    """The error for a model that has no safetensors file; None when `error` is about something else."""
    if not isinstance(error, OSError) or "model.safetensors" not in str(error):
        return None
    return cannot_load(
        model,
        "has no weights in safetensors, and others (.bin, .pt) are pickles, which are never opened; convert "
        "them where you trust them: load with transformers and save_pretrained",
    )


def _cannot_load(model: str, error: Exception) -> ModelError:
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return cannot_load(model, f"cannot be loaded ({reason})")
