"""Loads one rank's part of a model, and a small model of its kind for the check at load.

No process holds the whole model. So the check that `load_model` makes is made on a small model with random
weights: of the same class, with the same heads, cut in the same way, computed by the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.fused_decoder.shares import Share, norms_together, shares_of
from outrider.engine.fused_decoder.turning import Observed
from outrider.engine.gpu.coded_linear import without_codes
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.loading.check_forward import Plain, run_plain
from outrider.engine.loading.fp8_kv import FP8, check_kv_dtype, no_fp8
from outrider.engine.loading.loader import described, packed, place_weights, quantized_as
from outrider.engine.loading.model_config import find_context_length, read_config, skeleton_of
from outrider.engine.loading.model_path import check_model_path
from outrider.engine.loading.open_weights import InMemory, OpenWeights, Weight, without_mtp
from outrider.engine.loading.stored import (
    FULL,
    attach,
    dtype_of,
    read_generation_config,
    without_quantization,
)
from outrider.engine.make_runner import without_kernels
from outrider.engine.parallel.coded import check_coded, coded_parts, common_step, unquantized
from outrider.engine.parallel.cuts import Cuts, heads_of
from outrider.engine.parallel.layers import connect
from outrider.engine.parallel.meeting import device_of
from outrider.engine.parallel.order import Order, threads_of
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.parallel.sameness import check_same, digest_of
from outrider.engine.parallel.small import first_alike, random_network, small_config
from outrider.engine.parallel.weights import (
    check_shapes,
    dtype_of_floats,
    network_of,
    parts_of,
    skeleton_part,
)
from outrider.engine.quantization.checkpoint import layout_of, read_checkpoint
from outrider.engine.quantization.modules import shapes_of_linears
from outrider.engine.quantization.rounding import GROUP
from outrider.engine.threads import set_threads
from outrider.protocol.errors import ModelError


class Shard:
    """What a rank knows about a model before it has read a weight.

    Raises:
        ModelError: the model cannot run here, or not with this number of ranks.
    """

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        config = order.config
        check_model_path(config.model)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device = device_of(order)
        self._threads = set_threads(threads_of(config), self.device)
        check_kv_dtype(config.kv_dtype, self.device)
        self._settings, self._say = config, say
        self._fp8_kv = config.kv_dtype == FP8
        self._config = read_config(config.model, config.trust_remote_code)
        skeleton = skeleton_of(config.model, self._config, config.trust_remote_code)
        self._kind = type(skeleton)
        self._limit = find_context_length(self._config, config.context_length, say)
        self._geometry, self._shares = self._divided(skeleton)
        self._skeleton = skeleton
        self._layout = layout_of(config.model, self._config)
        without_quantization(self._config)
        self._rounded = 1 if config.weights == FULL else GROUP
        self._step = self._checked(order.rank)
        self._observed: list[Observed] = []
        """What each layer of the small model passes to attention."""

    def small(self, ranks: Ranks) -> tuple[LoadedModel, Plain]:
        """Return a rank's part of a small random model of this kind, and the results of that whole small
        model."""
        trusted = self._settings.trust_remote_code
        config = small_config(self._config, self._geometry, ranks.size, trusted)
        whole = random_network(config, self._dtype(), trusted)
        _, shares = self._divided(whole)
        weights: dict[str, Weight] = {name: InMemory(one) for name, one in whole.state_dict().items()}
        self._place(whole)
        plain = run_plain(whole, self._limit, fp8_kv=self._fp8_kv)
        self._observed = plain.observed
        cuts = self._cuts(shares, ranks.rank, self._rounded)
        made = partial(network_of, self._kind, config, parts_of(weights, cuts), cuts, self._dtype())
        return self._loaded(ranks, "small", made, plain.geometry, plain.observed), plain

    def whole(self, ranks: Ranks) -> LoadedModel:
        """Return a rank's part of the model itself. Call `small` first: layers of one kind rotate alike.

        Raises:
            ModelError: weights are missing or cannot be read or divided, or another rank has other weights.
        """
        self._say(f"loading the weights of {self._settings.model}, a part of {ranks.size}")
        with OpenWeights(self._settings.model) as opened:
            whole = unquantized(opened.weights, self._layout)
            check_shapes(self._settings.model, whole, self._skeleton, self._shares)
            check_same(ranks, digest_of(self._settings, self._config, opened.weights))
            cuts = self._cuts(self._shares, ranks.rank, self._step)
            used = without_mtp(opened.weights, self._config.get_text_config().num_hidden_layers)
            made = partial(self._network, used, cuts)
            alike = first_alike(self._config)
            small = sorted(set(alike))
            observed = [self._observed[small.index(layer)] for layer in alike]
            return self._loaded(ranks, "whole", made, self._geometry, observed)

    def _divided(self, network: PreTrainedModel) -> tuple[Geometry, dict[str, Share]]:
        """Return the heads and shares of a model that runs as a fused decoder; refuse others."""
        try:
            geometry, shares = shares_of(network)
            fused_decoder(network, geometry, _windows(network.config))
        except NotFused as reason:
            raise ModelError(
                f"tensor_parallel: {self._kind.__name__} cannot be divided between ranks ({reason}); "
                "set tensor_parallel to 1"
            ) from reason
        return geometry, shares

    def _checked(self, rank: int) -> int:
        """Return the numbers that stay together in the whole model, after checking that it can be divided
        so."""
        step = self._rounded
        if self._layout is not None:
            with OpenWeights(self._settings.model) as opened:
                step = lcm(step, common_step(opened.weights, self._layout, self._shares))
                check_coded(opened.weights, self._layout, self._cuts(self._shares, rank, step))
        self._cuts(self._shares, rank, step).check(self._geometry, self._rounded)
        return step

    def _cuts(self, shares: Mapping[str, Share], rank: int, step: int) -> Cuts:
        return Cuts(shares, rank, self._settings.tensor_parallel, step)

    def _place(self, network: PreTrainedModel) -> None:
        """Bring a network to the device, rounded if the settings ask for it."""
        place_weights(self._settings.model, network, self.device, self._settings.weights, self._say)

    def _dtype(self) -> torch.dtype:
        """Return the dtype in which the weights run."""
        if self._layout is not None or self._settings.dtype != "auto":
            return dtype_of(self._config, self._settings.dtype)
        stored = getattr(self._config, "dtype", None)
        if isinstance(stored, torch.dtype):
            return stored
        with OpenWeights(self._settings.model) as opened:
            return dtype_of_floats(opened.weights)

    def _network(self, weights: Mapping[str, Weight], cuts: Cuts) -> PreTrainedModel:
        """Return a rank's part of the model itself on the CPU, with codes if it has codes that run on the
        device."""
        dtype, layout = self._dtype(), self._layout
        if layout is None:
            return network_of(self._kind, self._config, parts_of(weights, cuts), cuts, dtype)
        alone = self.device.type != "cpu" and without_codes(dtype, self.device) is None
        shapes = shapes_of_linears(skeleton_part(self._kind, self._config, cuts)) if alone else None
        parts = coded_parts(weights, layout, cuts)
        found = read_checkpoint(self._settings.model, layout, parts, dtype, shapes)
        network = network_of(self._kind, self._config, found.tensors, cuts, dtype)
        attach(network, found, layout, self._say, codes=alone or self.device.type == "cpu")
        return network

    def _loaded(
        self,
        ranks: Ranks,
        name: str,
        made: Callable[[], PreTrainedModel],
        whole: Geometry,
        observed: Sequence[Observed],
    ) -> LoadedModel:
        """Return a rank's part of the small or the whole model; `made` makes its network."""
        network = made()
        self._place(network)
        config, (queries, keys) = network.config, heads_of(whole, ranks.size)
        part = replace(whole, query_heads=queries, kv_heads=keys)
        vocabulary = config.get_text_config().vocab_size
        try:
            decoder = fused_decoder(network, part, _windows(config), observed)
        except NotFused as reason:
            raise ModelError(f"tensor_parallel: {reason}; set tensor_parallel to 1") from reason
        connect(decoder, ranks, vocabulary, together=norms_together(self._shares))
        loaded = self._described(network, decoder, part, vocabulary, ranks.size)
        del network, decoder  # packing frees the weights one by one
        return self._packed(loaded, ranks, name)

    def _described(
        self, network: PreTrainedModel, decoder: FusedDecoder, part: Geometry, vocabulary: int, ranks: int
    ) -> LoadedModel:
        read_generation_config(network, self._settings.model)
        stored = FULL if self._layout is None else self._layout.name
        lacking = self._lacking(part, network.dtype)
        if self._fp8_kv and lacking is not None:
            raise no_fp8(lacking)
        return described(
            network,
            self._settings.model,
            vocabulary,
            model=decoder,
            context_length=self._limit,
            device=self.device,
            geometry=part,
            weights=quantized_as(stored, self._settings.weights),
            kernels=self.device.type != "cpu" and lacking is None,
            fp8_kv=self._fp8_kv,
            ranks=ranks,
        )

    def _lacking(self, part: Geometry, dtype: torch.dtype) -> str | None:
        """Return why GPU kernels do not run; None if they do, or if this is a CPU."""
        if self.device.type == "cpu":
            return None
        if norms_together(self._shares):
            return "queries and keys have norms over the heads of all ranks"
        return without_kernels(part, dtype, self.device)

    def _packed(self, loaded: LoadedModel, ranks: Ranks, model: str) -> LoadedModel:
        """Return the model with the kernels that rank 0 chooses: all ranks use the same."""
        settings, leads = self._settings, ranks.rank == 0
        wanted: str = settings.cpu_backend
        stage = f"kernels of {model} model"
        if not leads:
            (chosen,) = ranks.wait_for(stage, [0])
            wanted = chosen or wanted
        measured = leads and not settings.deterministic
        loaded = packed(loaded, WorkerPool(self._threads), wanted, measured, self._say)
        if leads:
            ranks.report(stage, loaded.choice.backend if loaded.choice else "")
        ranks.meet(f"packed {model} model")
        return loaded


def _windows(config: PretrainedConfig) -> dict[int, int | None]:
    """The sliding window of each layer."""
    layers: list[Any] = DynamicCache(config=config).layers
    return {i: layer.sliding_window if layer.is_sliding else None for i, layer in enumerate(layers)}
