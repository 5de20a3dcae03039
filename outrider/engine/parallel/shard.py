"""Loads one rank's part of a model, and a small model of its kind for the check at load.

The whole model is in no process, so the check that `load_model` makes is made of a small one with random
weights: the same class, the same heads, cut in the same way, computed by the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.fused_decoder.decoder import Experts
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.loading.check_forward import Plain, run_plain
from outrider.engine.loading.fp8_kv import FP8, check_kv_dtype, no_fp8
from outrider.engine.loading.loader import packed
from outrider.engine.loading.model_config import (
    FACTORY,
    eos_token_ids,
    find_context_length,
    generation_setting,
    read_config,
    skeleton_of,
)
from outrider.engine.loading.model_path import check_model_path
from outrider.engine.loading.move_weights import move_weights
from outrider.engine.make_runner import without_kernels
from outrider.engine.parallel.cuts import Cuts, Sizes, kv_heads_of, narrow, small
from outrider.engine.parallel.layers import connect
from outrider.engine.parallel.meeting import device_of
from outrider.engine.parallel.order import Order
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.parallel.sameness import check_same, digest_of
from outrider.engine.parallel.weights import Checkpoint, InMemory, Weight, network_of
from outrider.protocol.errors import ModelError


class Shard:
    """What a rank knows of a model before it has read a weight.

    Raises:
        ModelError: the model cannot run here, or not in so many ranks.
    """

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        config = order.config
        check_model_path(config.model)
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device = device_of(order)
        check_kv_dtype(config.kv_dtype, self.device)
        self._settings, self._say = config, say
        self._fp8_kv = config.kv_dtype == FP8
        self._config = read_config(config.model, config.trust_remote_code)
        skeleton = skeleton_of(config.model, self._config, config.trust_remote_code)
        self._kind = type(skeleton)
        self._limit = find_context_length(self._config, config.context_length, say)
        if getattr(self._config, "quantization_config", None):
            raise ModelError("tensor_parallel: quantized weights cannot be divided; set tensor_parallel to 1")
        self._sizes = self._divided(skeleton)
        self._sizes.check(config.tensor_parallel)

    def small(self, ranks: Ranks) -> tuple[LoadedModel, Plain]:
        """A rank's part of a small random model of this kind, and what the whole of it computes."""
        config = small(self._config, self._sizes, ranks.size)
        whole = _random_network(config, self._dtype(), self._settings.trust_remote_code)
        move_weights(whole, self.device, self._say)
        plain = run_plain(whole, self._limit, fp8_kv=self._fp8_kv)
        weights: dict[str, Weight] = {name: InMemory(one.cpu()) for name, one in whole.state_dict().items()}
        return self._loaded(ranks, config, weights, plain.geometry, "small"), plain

    def whole(self, ranks: Ranks, geometry: Geometry) -> LoadedModel:
        """A rank's part of the model itself; `geometry` is of the small one.

        Raises:
            ModelError: weights are missing, or cannot be read or divided, or another rank has others.
        """
        self._say(f"loading the weights of {self._settings.model}, a part of {ranks.size}")
        geometry = replace(geometry, num_layers=len(_windows(self._config)))
        with Checkpoint(self._settings.model) as checkpoint:
            check_same(ranks, digest_of(self._settings, self._config, checkpoint.weights))
            return self._loaded(ranks, self._config, checkpoint.weights, geometry, "whole")

    def _divided(self, skeleton: PreTrainedModel) -> Sizes:
        """What is divided of a fused decoder with layers like Llama's; others are refused."""
        try:
            sizes = Sizes.of(self._config)
            windows = _windows(self._config)
            heads = (sizes.query_heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim)
            _check_divisible(fused_decoder(skeleton, Geometry(len(windows), *heads), windows))
        except NotFused as reason:
            raise ModelError(
                f"tensor_parallel: {self._kind.__name__} cannot be divided between ranks ({reason}); "
                "set tensor_parallel to 1"
            ) from reason
        return sizes

    def _dtype(self) -> torch.dtype:
        """What the weights run in."""
        wanted = self._settings.dtype
        if wanted != "auto":
            found: torch.dtype = getattr(torch, wanted)
            return found
        with Checkpoint(self._settings.model) as checkpoint:
            stored = getattr(self._config, "dtype", None)
            if isinstance(stored, torch.dtype):
                return stored
            return next(iter(checkpoint.weights.values()))[0:1].dtype

    def _loaded(
        self,
        ranks: Ranks,
        config: PretrainedConfig,
        weights: Mapping[str, Weight],
        geometry: Geometry,
        model: str,
    ) -> LoadedModel:
        """A rank's part of a model with this whole configuration and these whole weights."""
        sizes = Sizes.of(config)
        part = replace(
            geometry,
            query_heads=geometry.query_heads // ranks.size,
            kv_heads=kv_heads_of(sizes, ranks.size),
        )
        cuts = Cuts(sizes, ranks.rank, ranks.size)
        network = network_of(self._kind, narrow(config, sizes, ranks.size), weights, cuts, self._dtype())
        move_weights(network, self.device, self._say)
        try:
            decoder = connect(fused_decoder(network, part, _windows(config)), ranks, sizes.vocabulary)
        except NotFused as reason:
            raise ModelError(f"tensor_parallel: {reason}; set tensor_parallel to 1") from reason
        loaded = self._described(network, decoder, part, sizes.vocabulary, ranks.size)
        del network, decoder  # its weights are freed as they are packed
        return self._packed(loaded, ranks, model)

    def _described(
        self, network: PreTrainedModel, decoder: FusedDecoder, part: Geometry, vocabulary: int, ranks: int
    ) -> LoadedModel:
        _read_generation_config(network, self._settings.model)
        on_cpu = self.device.type == "cpu"
        lacking = None if on_cpu else without_kernels(part, network.dtype, self.device)
        if self._fp8_kv and lacking is not None:
            raise no_fp8(lacking)
        return LoadedModel(
            model=decoder,
            name=Path(self._settings.model).name,
            vocabulary_size=vocabulary,
            context_length=self._limit,
            eos_token_ids=eos_token_ids(network),
            bos_token_id=generation_setting(network, "bos_token_id"),
            dtype=network.dtype,
            device=self.device,
            geometry=part,
            hidden_size=network.config.get_text_config().hidden_size,
            kernels=not on_cpu and lacking is None,
            fp8_kv=self._fp8_kv,
            ranks=ranks,
        )

    def _packed(self, loaded: LoadedModel, ranks: Ranks, model: str) -> LoadedModel:
        """With the kernels that rank 0 chooses: all ranks use the same."""
        settings, leads = self._settings, ranks.rank == 0
        wanted: str = settings.cpu_backend
        stage = f"kernels of {model} model"
        if not leads:
            (chosen,) = ranks.wait_for(stage, [0])
            wanted = chosen or wanted
        measured = leads and not settings.deterministic
        loaded = packed(loaded, WorkerPool(settings.threads), wanted, measured, self._say)
        if leads:
            ranks.report(stage, loaded.choice.backend if loaded.choice else "")
        ranks.meet(f"packed {model} model")
        return loaded


def _check_divisible(decoder: FusedDecoder) -> None:
    if (part := decoder.beyond_llama()) is not None:
        raise NotFused(f"it has {part}")
    for layer in decoder.stack:
        if isinstance(layer.mlp, Experts):
            raise NotFused(f"the experts of layer {layer.index} are not divided")
        if layer.settings.scores.sinks is not None:
            raise NotFused(f"the sinks of layer {layer.index} are not divided")


def _random_network(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """A model whose weights are the same on every rank, and so wide that tokens differ."""
    generator = torch.Generator().manual_seed(0)
    network: Any = FACTORY.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    for weight in network.parameters():
        if weight.ndim == 1:  # norms and biases, which begin as ones and zeros
            weight.data += torch.empty_like(weight).uniform_(-0.25, 0.25, generator=generator)
        else:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    evaluated: PreTrainedModel = network.requires_grad_(False).eval()
    return evaluated


def _windows(config: PretrainedConfig) -> dict[int, int | None]:
    """The sliding window of each layer."""
    layers: list[Any] = DynamicCache(config=config).layers
    return {i: layer.sliding_window if layer.is_sliding else None for i, layer in enumerate(layers)}


def _read_generation_config(network: PreTrainedModel, model: str) -> None:
    """Set what the model's generation_config.json says, if it has one."""
    try:
        network.generation_config = GenerationConfig.from_pretrained(model)
    except OSError:
        return
