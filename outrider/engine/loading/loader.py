"""Loads a decoder-only model and makes sure that this engine computes what the model computes.

The stages of `load_model` are settings -> support -> weights -> fused decoder -> packing -> self check. Any
fault becomes a ModelError with one sentence, before a port is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.engine.cpu.backend import AUTO, codes_backend, preferred, vector_backend
from outrider.engine.cpu.choice import BackendChoice, choose_backend
from outrider.engine.cpu.linear import expert_weights, pack_linears, runs_codes
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.gpu.accelerator import kernel_errors
from outrider.engine.gpu.coded_linear import without_codes
from outrider.engine.linears import linear_weight, linears_of
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.alibi import uses_alibi
from outrider.engine.loading.check_determinism import check_determinism
from outrider.engine.loading.check_forward import TOLERANCE, Plain, check_paged, moved_by_fp8, run_plain
from outrider.engine.loading.code_weights import code_weights
from outrider.engine.loading.fingerprint import fingerprint
from outrider.engine.loading.fp8_kv import FP8, check_kv_dtype, no_fp8
from outrider.engine.loading.layers import leave_out
from outrider.engine.loading.model_config import (
    LOAD_ERRORS,
    bos_token_id,
    eos_token_ids,
    factory_of,
    find_context_length,
    find_device,
    other_shape,
    read_config,
    skeleton_of,
    unreadable,
    usable,
    without_scales,
)
from outrider.engine.loading.model_path import cannot_load, check_model_path, name_of
from outrider.engine.loading.move_weights import move_weights
from outrider.engine.loading.open_weights import INDEX, ONE_FILE, check_index
from outrider.engine.loading.stored import FULL, read_quantized
from outrider.engine.make_runner import without_kernels
from outrider.engine.quantization.modules import round_linears
from outrider.engine.quantization.rounding import BITS
from outrider.engine.threads import leave_cores_to, set_threads
from outrider.protocol.errors import ModelError

FUSED_STRICTNESS = 2.0
"""Factor by which the fused decoder's tolerance is smaller than `TOLERANCE` in 16 bits."""


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
    weights: str = FULL,
    kv_dtype: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Load a model from a folder or hub id.

    `dtype` and `device` may be auto; `threads` may be 0, see `set_threads`; `context_length` 0 is the model's
    own limit. Without `fused`, or where the fused decoder does not fit, the model's own modules run.
    `deterministic` refuses a model whose results depend on the batch. On the CPU a thread on each of
    `helper_cores` takes part in long steps, and `cpu_backend` is auto or one of
    `outrider.engine.cpu.backend`. `skipped_layers` are removed from the model. `weights` int8 or int4 rounds
    the linear layers that are not quantized already. `kv_dtype` fp8 keeps keys and values in 8 bits, by GPU
    kernels.

    Raises:
        ModelError: the model cannot be loaded, is of a kind that cannot run here, or fails the self check.
    """
    _begin(model)
    place, fp8 = usable(find_device(device)), kv_dtype == FP8
    threads = set_threads(threads, place)
    check_kv_dtype(kv_dtype, place)
    config = read_config(model, trust_remote_code)
    skeleton_of(model, config, trust_remote_code)
    limit = find_context_length(config, context_length, say)
    say(f"loading the weights of {model}")
    network, stored = _read_weights(model, dtype, place, trust_remote_code, say)
    if fp8 and uses_alibi(network):
        raise no_fp8("its keys carry positions, which 8 bits do not hold")
    if skipped_layers:
        leave_out(network, skipped_layers)
    place_weights(model, network, place, weights, say)
    plain = _observed(network, limit, fp8, say)
    loaded = described(
        network,
        model,
        plain.logits.shape[-1],
        model=network,
        context_length=limit,
        device=place,
        geometry=plain.geometry,
        weights=quantized_as(stored, weights),
        fp8_kv=fp8,
        fingerprint=fingerprint(network),
    )
    if not loaded.eos_token_ids:
        say("no token ends a text: eos_token_id is not set in generation_config.json")
    loaded = _arranged(_with_kernels(loaded, say), network, plain, fused, say)
    del network  # a fused decoder owns its weights; packing frees them one by one
    # The library's results depend on the batch, so it is no alternative if `deterministic`.
    loaded = packed(loaded, WorkerPool(threads, helper_cores), cpu_backend, not deterministic, say)
    if deterministic:
        return _deterministic(loaded, plain, say)
    check_paged(loaded, plain)
    return loaded


def load_network(model: str, *, dtype: str, device: str, threads: int) -> PreTrainedModel:
    """Return the model as transformers runs it, for studies of its layers. Arguments are those of
    `load_model`.

    Raises:
        ModelError: it cannot be loaded.
    """
    _begin(model)
    place, say = usable(find_device(device)), lambda _: None
    set_threads(threads, place)
    network, _ = _read_weights(model, dtype, None, trust_remote_code=False, say=say)
    _move(model, network, place, say)
    return network


def _begin(model: str) -> None:
    """Refuse what is plainly no model, and let transformers be silent."""
    check_model_path(model)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its reports are errors or lines of ours


def described(network: PreTrainedModel, source: str, vocabulary_size: int, **others: Any) -> LoadedModel:
    """Return the LoadedModel of a folder or hub id; `others` are its remaining fields."""
    return LoadedModel(
        name=name_of(source),
        vocabulary_size=vocabulary_size,
        eos_token_ids=eos_token_ids(network),
        bos_token_id=bos_token_id(network),
        dtype=network.dtype,
        hidden_size=network.config.get_text_config().hidden_size,
        num_layers=network.config.get_text_config().num_hidden_layers,
        **others,
    )


def _observed(network: PreTrainedModel, limit: int, fp8: bool, say: Callable[[str], None]) -> Plain:
    """Run the model as transformers does, and say how far fp8 keys and values move its logits."""
    say("checking the model against this engine")
    plain = run_plain(network, limit, fp8_kv=fp8)
    if fp8:
        moved = moved_by_fp8(network, plain, limit)
        say(f"fp8 keys and values move logits of random tokens by {moved:.1%} of how they spread")
    return plain


def quantized_as(*kinds: str) -> str:
    """Return the formats among `kinds` that are not full precision: how the checkpoint stores weights, and
    how the other weights are rounded."""
    return " ".join(kind for kind in kinds if kind != FULL)


def _with_kernels(loaded: LoadedModel, say: Callable[[str], None]) -> LoadedModel:
    """Return the model with GPU kernels, if its device runs them and they support the model."""
    if loaded.device.type == "cpu":
        return loaded
    reason = without_kernels(loaded.geometry, loaded.dtype, loaded.device)
    if reason is not None and loaded.fp8_kv:
        raise no_fp8(reason)
    if reason is not None:
        say(f"without kernels: {reason}; plain torch computes this model")
    return replace(loaded, kernels=reason is None)


def _arranged(
    loaded: LoadedModel, network: PreTrainedModel, plain: Plain, fused: bool, say: Callable[[str], None]
) -> LoadedModel:
    """Return the model as it runs here: fused and with kernels, each only if it computes the same."""
    made = _made_fused(loaded, network, plain, say) if fused else loaded
    if not loaded.kernels:
        return made
    try:
        check_paged(made, plain)
    except _misfits() as reason:
        if loaded.fp8_kv:
            raise no_fp8(reason) from reason
        say(f"without kernels: {reason}; plain torch computes this model")
        return _arranged(replace(loaded, kernels=False), network, plain, fused, say)
    return made


def _deterministic(loaded: LoadedModel, plain: Plain, say: Callable[[str], None]) -> LoadedModel:
    """Return the model with sums that do not depend on the batch, and check it.

    Raises:
        ModelError: there are no such kernels for it here, or they compute something else.
    """
    made = _in_order(loaded)
    try:
        check_paged(made, plain)
        say("checking that a token's bits do not depend on its batch")
        check_determinism(made)
    except kernel_errors() as error:
        raise ModelError(
            f"deterministic: kernels for it do not fit {made.device} ({error}); set deterministic off"
        ) from error
    return made


def _in_order(loaded: LoadedModel) -> LoadedModel:
    """Return the model with ordered kernels, if it runs fused on GPU kernels."""
    if not loaded.kernels or not isinstance(loaded.model, FusedDecoder):
        return loaded
    # Imports Triton, which is installed where the kernels run.
    from outrider.engine.gpu.ordered_linear import order_linears

    order_linears(loaded.model)
    return replace(loaded, ordered=True)


def _misfits() -> tuple[type[Exception], ...]:
    """The errors which say that a model does not run in some way."""
    return (NotFused, ModelError, *kernel_errors())


def _made_fused(
    loaded: LoadedModel, network: PreTrainedModel, plain: Plain, say: Callable[[str], None]
) -> LoadedModel:
    """Return the model as a fused decoder if that computes the same, otherwise unchanged."""
    try:
        seen = plain.geometry, plain.windows, plain.observed, plain.instead
        decoder = fused_decoder(network, *seen)
        made = replace(loaded, model=decoder, geometry=decoder.geometry)
        check_paged(made, plain, FUSED_STRICTNESS)
    except _misfits() as reason:
        say(f"without the fused decoder: {reason}")
        return loaded
    return made


def place_weights(
    model: str, network: PreTrainedModel, place: torch.device, weights: str, say: Callable[[str], None]
) -> None:
    """Bring a model to its device, rounded if `weights` asks for it. The CPU gets numbers and codes, other
    devices only the codes of linear layers.

    Raises:
        ModelError: there are no kernels for codes, or not enough memory.
    """
    if place.type != "cpu":
        _place_codes(model, network, place, weights, say)
    _move(model, network, place, say)
    if place.type == "cpu" and weights != FULL:
        _round_weights(network, weights, say)


def _place_codes(
    model: str, network: PreTrainedModel, place: torch.device, weights: str, say: Callable[[str], None]
) -> None:
    reason = without_codes(network.dtype, place)
    if reason is not None and weights != FULL:
        raise ModelError(f"weights: {weights} does not run on {place}: {reason}, or leave weights out")
    if reason is None:
        with _readable(model):
            count = code_weights(network, place, BITS.get(weights), say)
        if count:
            say(f"{count} linear layers are codes on {place}")


def _move(model: str, network: PreTrainedModel, place: torch.device, say: Callable[[str], None]) -> None:
    with _readable(model):
        move_weights(network, place, say)


@contextmanager
def _readable(model: str) -> Iterator[None]:
    """Turn errors that are raised while weights are read into one sentence."""
    try:
        yield
    except LOAD_ERRORS as error:
        raise _without_safetensors(model, error) or unreadable(model, error) from error


def _round_weights(network: PreTrainedModel, weights: str, say: Callable[[str], None]) -> None:
    """Round a model's weights on the CPU.

    Raises:
        ModelError: there are no kernels for rounded weights.
    """
    if vector_backend(network.dtype) is None:
        raise ModelError(
            f"weights: {weights} takes a processor with AVX2 or AVX-512, and the package numba; leave it out"
        )
    say(f"rounding {round_linears(network, BITS[weights])} linear layers to {weights}")


def packed(
    loaded: LoadedModel, workers: WorkerPool, wanted: str, measured: bool, say: Callable[[str], None]
) -> LoadedModel:
    """Return the model with packed linear layers if it is on the CPU; the worker pool shares their work."""
    if loaded.device.type != "cpu":
        return loaded
    linears = linears_of(loaded.model).values()
    weights = [linear_weight(module) for module in linears if not runs_codes(module)]
    weights += [weight for module in loaded.model.modules() for weight in expert_weights(module)]
    if weights or not linears:
        choice = choose_backend(weights, wanted, measured=measured)
    else:
        backend = codes_backend(preferred(loaded.dtype, wanted), loaded.dtype)
        choice = BackendChoice(backend, "all weights are codes")
    del weights, linears
    if isinstance(loaded.model, FusedDecoder):
        leave_cores_to(choice.backend)
    gates = loaded.model.gates if isinstance(loaded.model, FusedDecoder) else ()
    count = pack_linears(loaded.model, choice.backend, workers, gates)
    if isinstance(loaded.model, FusedDecoder):
        loaded.model.let_go()
    say(f"{count} linear layers on {choice.backend} with {workers}: {choice.reason}")
    return replace(loaded, choice=choice, workers=workers)


def _read_weights(
    model: str, dtype: str, place: torch.device | None, trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[PreTrainedModel, str]:
    """Return the model on the CPU, and how its checkpoint stores weights; `place` is that of
    `read_quantized`."""
    with _readable(model):
        found = read_quantized(model, dtype, place, trust_remote_code, say)
        network, info, stored = found or (*_from_files(model, dtype, trust_remote_code), FULL)
    for name, stored_shape, shape in sorted(info["mismatched_keys"]):
        raise other_shape(model, name, stored_shape, shape)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"model: {model!r} lacks {len(missing)} weights of {type(network).__name__}, such as "
            f"{missing[0]}; use the config.json that belongs to the weights, or a checkpoint with a "
            "language-model head"
        )
    if unused := sorted(info["unexpected_keys"]):
        say(f"{len(unused)} weights of the checkpoint are not used, such as {unused[0]}")
    if network.dtype not in TOLERANCE:
        raise ModelError(f"dtype: weights of {network.dtype} cannot run here; set float32 or bfloat16")
    without_scales(network)
    network.requires_grad_(False)
    evaluated: PreTrainedModel = network.eval()
    return evaluated, stored


def _from_files(model: str, dtype: str, trust_remote_code: bool) -> Any:
    """Return the model on the CPU, and transformers' report on its weights."""
    config = read_config(model, trust_remote_code)
    check_index(model)
    return factory_of(config).from_pretrained(
        model,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the caller names them, where transformers only logs them
        use_safetensors=True,  # other formats are pickles: opening one runs its code
    )


def _without_safetensors(model: str, error: Exception) -> ModelError | None:
    """The error for a model whose safetensors files are not found or cannot be opened; None when `error` is
    about something else."""
    if not isinstance(error, OSError):
        return None
    found = sorted(Path(model).glob("*.safetensors"))
    for path in found:  # safetensors says of every file that it cannot open that there is none
        try:
            path.open("rb").close()
        except OSError as refused:
            return cannot_load(model, f"has {path.name}, which cannot be opened ({refused.strerror})")
    if ONE_FILE not in str(error):
        return None
    if found:
        return cannot_load(model, f"has {found[0].name}, but no {ONE_FILE}, nor an {INDEX}; fetch them")
    return cannot_load(
        model,
        "has no weights in safetensors, and others (.bin, .pt) are pickles, which are never opened; convert "
        "them where you trust them: load with transformers and save_pretrained",
    )
