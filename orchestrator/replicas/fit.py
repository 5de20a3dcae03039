"""Whether a replica fits the model that is served. Pure."""

from __future__ import annotations

from outrider.protocol.messages import ModelInfo


def agrees(info: ModelInfo, served: ModelInfo) -> bool:
    """Whether a verify replica has the model that is served."""
    return (info.model, info.vocabulary_hash) == (served.model, served.vocabulary_hash)


def mismatch_of(kind: str, info: ModelInfo, served: ModelInfo | None) -> str:
    """Why a replica cannot be used with the model that is served; empty when it can."""
    if served is None:
        return "" if kind == "draft" else "not serving yet"
    if kind == "verify":
        return "" if agrees(info, served) else f"serves {info.model!r}, not {served.model!r}"
    if info.vocabulary_hash not in ("", served.vocabulary_hash):
        return f"the vocabulary of {info.model!r} is not that of {served.model!r}"
    return _features_mismatch(info, served)


def _features_mismatch(draft: ModelInfo, target: ModelInfo) -> str:
    """Why a draft cannot read the layers of a target; empty when it can, or reads none."""
    layers = draft.feature_layers
    if not layers:
        return ""
    if draft.hidden_size != target.hidden_size or max(layers) >= target.num_layers:
        return (
            f"{draft.model!r} reads layers {layers} of width {draft.hidden_size}, and {target.model!r} has "
            f"{target.num_layers} of width {target.hidden_size}; use a head that was trained for it"
        )
    return ""
