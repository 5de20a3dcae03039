"""`outrider plan`: reads a pair's files, sizes it for a device, prints the figures and an overlay."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.cli.named_models import check_vocabulary, naming
from outrider.cli.plan.checkpoint import read_checkpoint
from outrider.cli.plan.devices import GB, device_of
from outrider.cli.plan.overlay import overlay
from outrider.cli.plan.sizing import NODES, Fit, fit, replicas_for
from outrider.cli.up.plan import LOOKUP, MTP, NONE
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.protocol.errors import ModelError


def plan(arguments: argparse.Namespace) -> int:
    """Print what the pair needs, as comments, and the overlay after them.

    Raises:
        ConfigError: a model cannot be read, the pair does not fit together, or does not fit the device.
    """
    device = device_of(arguments.gpu, arguments.memory, arguments.bandwidth)
    with naming("--target"):
        read = read_checkpoint(arguments.target, arguments.dtype, arguments.weights, arguments.kv_dtype)
    with naming("--draft"):
        draft_folder = _only(arguments.draft)
        _refuse_no_model(draft_folder)
        own = arguments.draft_weights, arguments.draft_kv_dtype
        models = [read, read_checkpoint(draft_folder, arguments.dtype, *own)]
    sizes = models[0].vocabulary_size, models[1].vocabulary_size
    check_vocabulary(arguments.target, draft_folder, sizes)
    target = fit(models[0], device, arguments.context)
    shorter = min(target.context, models[1].context_length or target.context)
    draft = fit(models[1], device, shorter, "--draft-")
    wanted = arguments.sessions or target.sessions
    figures = ["outrider " + shlex.join(sys.argv[1:]), *_pair(target, draft), *_need(target, draft, wanted)]
    print("\n".join(f"# {line}" for line in figures))
    print(overlay(target, draft, _most(target, wanted), _most(draft, wanted)), end="")
    return 0


def _only(drafts: Sequence[str]) -> str:
    if len(drafts) > 1:
        raise ModelError("given several times; plan with one draft, and again for each of the others")
    return drafts[0]


def _refuse_no_model(draft: str) -> None:
    from outrider.engine.heads.eagle_config import is_head
    from outrider.engine.loading.tokenizer_files import json_file

    if draft in (LOOKUP, MTP, NONE):
        raise ModelError(f"{draft!r} is no model with a size of its own; plan with a draft model")
    if Path(draft).is_dir() and is_head(json_file(draft, "config.json")):
        raise ModelError(f"{draft!r} is an EAGLE head, whose size is not computed; plan with a draft model")


def _pair(target: Fit, draft: Fit) -> list[str]:
    device = target.device
    speed = f", {device.bandwidth / GB:,.0f} GB/s" if device.bandwidth else ""
    lines = [f"{device.name}: {device.memory / GB:,.0f} GB{speed}; each replica has one of its own."]
    for title, one in (("target", target), ("draft", draft)):
        lines += _replica(title, one)
    return lines


def _replica(title: str, one: Fit) -> list[str]:
    model = one.checkpoint
    rounded = "" if model.weights == "full" else f", linear layers {model.weights}"
    weights = f"{model.parameters / 1e6:,.1f} M weights in {model.dtype}{rounded}"
    weights += f", {model.weight_bytes / GB:,.2f} GB"
    kept = "" if model.kv_dtype == "auto" else f" in {model.kv_dtype}"
    memory = (
        f"{one.kv_tokens:,} tokens of keys and values{kept} ({model.kv_bytes_per_token:,} bytes each) on "
        f"{one.pages:,} pages of {PAGE_SIZE}"
    )
    room = f"{one.sessions:,} sessions of {one.context:,} tokens and {NODES} candidates fit at once"
    return [f"{title} {model.name}: {weights}", f"  {memory}", f"  {room}", *_floors(one)]


def _floors(one: Fit) -> list[str]:
    """Lines with the least time of a step, which counts only reads of memory; a real step takes longer."""
    alone, full = one.step_seconds(1), one.step_seconds(one.sessions)
    if alone is None or full is None:
        return ["  step: give --bandwidth, in GB/s, for the least time that a step can take"]
    return [
        f"  a step takes at least {alone * 1e3:.2f} ms for one session, {full * 1e3:.2f} ms for all of them "
        "(bytes read / bandwidth)"
    ]


def _need(target: Fit, draft: Fit, wanted: int) -> list[str]:
    verify, drafts = replicas_for(target, wanted), replicas_for(draft, wanted)
    scale = f"kubectl -n outrider scale --replicas {{}} {{}}  # for {wanted:,} sessions at once"
    return [scale.format(verify, "statefulset/verify"), scale.format(drafts, "deployment/draft")]


def _most(one: Fit, wanted: int) -> int:
    """Most sessions that a replica takes: more than it has pages for would only wait there."""
    return min(one.sessions, wanted)
