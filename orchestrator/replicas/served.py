"""Decides which model is served, and whether a replica fits it.

The served model is that of the first verify replica. A verify replica with another model, with other weights
or with another tokenizer is kept out until none with the old model is left; requests for the old one end
then. Every probe compares a draft with the served model.

Replicas of one model may differ in limits that requests are checked against, such as the context length.
These come from a running verify replica: once all have been restarted with another context, that one holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc

from orchestrator.replicas.pool import Replicas
from orchestrator.replicas.probe import fetch_tokenizer
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.messages import ModelInfo
from outrider.protocol.vocabulary import vocabulary_mismatch
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are checked against."""

    info: ModelInfo
    tokenizer: TextTokenizer | None

    @property
    def takes_chat(self) -> bool:
        """Whether prompts may be conversations."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def bytes_per_token(self) -> int:
        """Most bytes of text that one token stands for; 0 without a tokenizer."""
        return 0 if self.tokenizer is None else self.tokenizer.bytes_per_token


class Served:
    """The model that the replicas of `pools` serve, once one is known."""

    def __init__(self, pools: Mapping[str, Replicas]) -> None:
        self.model: ServedModel | None = None
        self._pools = pools
        self._adopting = asyncio.Lock()

    @property
    def available(self) -> bool:
        """Whether some verify replica answered its last probe with the model that is served."""
        return any(self._agrees(info) for info in self._answering())

    async def consider(self, info: ModelInfo, channel: grpc.aio.Channel) -> None:
        """Serve this verify replica's model if none is served yet, or if no replica has the old one any more.

        Raises:
            OutriderError: its tokenizer cannot be fetched.
        """
        async with self._adopting:
            if self.model is not None and not self._takes_over(info, self.model.info):
                return
            self.model = ServedModel(info, await fetch_tokenizer(channel))
        logger.info("serving model", model=info.model, vocabulary_size=info.vocabulary_size)
        for kind, pool in self._pools.items():
            for replica in pool:
                if replica.info is not None:
                    replica.mismatch = self.mismatch(kind, replica.info)

    def mismatch(self, kind: str, info: ModelInfo) -> str:
        """Why a replica cannot be used; empty when it can."""
        return mismatch_of(kind, info, None if self.model is None else self.model.info)

    def compare_arithmetic(self, endpoint: str, info: ModelInfo) -> None:
        """Warn when a verify replica rounds differently from the one that the served model came from."""
        if self.model is None or not self._agrees(info) or info.arithmetic == self.model.info.arithmetic:
            return
        logger.warning(
            "verify replicas differ in arithmetic: a session that moves between them may continue "
            "differently where two tokens are nearly equally likely; use one kind of processor, "
            "or set cpu_backend",
            endpoint=endpoint,
            arithmetic=info.arithmetic,
            others=self.model.info.arithmetic,
        )

    def gone(self, info: ModelInfo, needs_weights: bool) -> str:
        """Why a request that was checked against this model cannot go on; empty when it can.

        Unless it needs these weights, other weights of the same model will do.
        """
        if self.model is None:
            return ""
        served = self.model.info
        asked = info if needs_weights else replace(info, version=served.version)
        other = mismatch_of("verify", served, asked)
        return (
            other and f"model: {info.model!r} of this request is not served now: a replica {other}; ask anew"
        )

    def _takes_over(self, info: ModelInfo, served: ModelInfo) -> bool:
        """Whether this verify replica decides from now on what is served.

        It does when it has another model or other limits, and no replica that answers has the old ones.
        """
        if not self._agrees(info):
            return not self.available
        as_before = [
            other for other in self._answering() if self._agrees(other) and _checks(other) == _checks(served)
        ]
        return _checks(info) != _checks(served) and not as_before

    def _answering(self) -> list[ModelInfo]:
        """What the verify replicas that answered their last probe serve."""
        return [
            replica.info
            for replica in self._pools["verify"]
            if replica.info is not None and replica.serving and replica.missed_probes == 0
        ]

    def _agrees(self, info: ModelInfo) -> bool:
        return self.model is not None and not mismatch_of("verify", info, self.model.info)


def mismatch_of(kind: str, info: ModelInfo, served: ModelInfo | None) -> str:
    """Why a replica cannot be used with the model that is served; empty when it can."""
    if served is None:
        return "" if kind == "draft" else "not serving yet"
    if kind == "verify":
        if info.model != served.model:
            return f"serves {info.model!r}, not {served.model!r}"
        if info.vocabulary_hash != served.vocabulary_hash:
            return f"serves {info.model!r} with another vocabulary"
        if info.version and served.version and info.version != served.version:
            return f"serves {info.model!r} with other weights, or another tokenizer or chat template"
        return ""
    digest = info.vocabulary_hash or served.vocabulary_hash
    other = vocabulary_mismatch((served.model, served.vocabulary_hash), (info.model, digest))
    return other or _features_mismatch(info, served)


def _checks(info: ModelInfo) -> tuple[object, ...]:
    """Properties, in addition to the model, that requests are checked against or completed with."""
    return info.context_length, info.eos_token_ids, dict(info.sampling_defaults)


def _features_mismatch(draft: ModelInfo, target: ModelInfo) -> str:
    """Why a draft cannot read the layers of a target; empty when it can, or reads none."""
    layers = draft.feature_layers
    if not layers:
        return ""
    if draft.hidden_size != target.hidden_size or max(layers) > target.num_layers:
        return (
            f"{draft.model!r} reads layers {layers} of width {draft.hidden_size}, and {target.model!r} has "
            f"{target.num_layers} of width {target.hidden_size}; use a head that was trained for it"
        )
    return ""
