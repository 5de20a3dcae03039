"""The self check at load: does the paged, packed forward compute what the model computes by itself?

    run_plain     a few short sequences through the model as transformers runs it, before anything is changed
    check_paged   the same sequences in chunks, as a tree, after a commit and in a ragged batch

Anything in an architecture that this engine does not know (another mask, a bias on the scores, keys shared
between layers) shows as a difference here instead of as wrong text later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from outrider.engine.fused_decoder.turning import Observed
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.loading.attention_shapes import (
    attention_calls,
    embedded_instead,
    geometry_of,
    observed,
)
from outrider.engine.loading.fp8_kv import RoundedCache
from outrider.engine.loading.model_config import no_interface, without_room
from outrider.engine.loading.own_attention import has_known_attention
from outrider.engine.loading.wide_linears import WideLinears
from outrider.engine.make_runner import make_runner
from outrider.engine.recurrent.probing import recurrent_modules
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError

SEQUENCES, LENGTH = 4, 24
"""How many sequences are checked, and how many tokens of each."""
CHECK_PAGES, CHECK_PAGE_SIZE = 64, 4
"""Small pages, so that short sequences have several."""
SHARED = 13
"""The first three sequences begin with the same tokens: they are the paths of the tree."""
PROMPT = SHARED - 1
"""Tokens before the tree."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest accepted distance of logits, relative to their spread."""
FP8_NOISE = 2.0
"""Factor of the accepted distance where keys and values have 8 bits: where a 16-bit rounding differs, the
8-bit number is now and then the next one. The distance was 1.0 to 3.7 times as large on tiny models."""
ROUNDING_FACTOR, MAX_ROUNDING = 2.0, 0.5
"""Where a router finds experts equally good, rounding chooses. So with experts in 16 bits, the accepted
distance is this factor times how far other rounding of the embeddings moves the same logits, and at most
MAX_ROUNDING."""
JITTERS = 4
"""How often the embeddings are rounded otherwise: the farthest logits count, since one rounding more may
choose the same experts."""

Result: TypeAlias = tuple[str, list[tuple[int, int]], torch.Tensor]
"""The name of a step, the sequence and position of each of its rows, and their logits [rows, V]."""

_RUN_ERRORS = (MemoryError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""The errors of a model that does not run in the engine's way."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's own results. Shapes: R sequences, T tokens, V vocabulary."""

    tokens: list[list[int]]
    logits: torch.Tensor
    """[R, T, V] float32."""
    geometry: Geometry
    windows: dict[int, int | None]
    """The sliding window of each layer."""
    observed: list[Observed]
    """What each layer passes to attention at the first and the last position; empty if not all layers do
    so."""
    instead: dict[int, int]
    """For tokens that are not embedded, the tokens that are embedded in their place."""
    rounding: torch.Tensor | None = None
    """[R, T]: how far other rounding of the embeddings moves the logits, relative to their spread; None if
    there are no experts, or the model has float32."""


def run_plain(network: PreTrainedModel, context_length: int, *, fp8_kv: bool = False) -> Plain:
    """Run the check's sequences through the unchanged model, and find the shapes of its attention.

    With `fp8_kv` attention sees keys and values that are rounded to 8 bits.

    Raises:
        ModelError: the model does not run, keeps no keys and values, returns NaN or infinite logits, has no
        attention that can be replaced, or has attention whose window differs from its cache's.
    """
    kind = type(network).__name__
    if context_length < LENGTH:
        raise ModelError(f"context_length: {context_length} is too small; set at least {LENGTH}")
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        network.set_attn_implementation("eager")  # sdpa omits it, in some versions silently
    try:
        with torch.inference_mode(), WideLinears():
            plain = _run_plain(network, context_length, fp8_kv)
    except _RUN_ERRORS as error:
        raise without_room(error) or ModelError(
            f"model: {kind} does not run as a plain decoder ({error}); use another model"
        ) from error
    _check_finite(plain.logits, kind, network.dtype)
    return plain


def check_numbers(runner: ModelRunner) -> None:
    """Compute a few random tokens with a model that no process holds as a whole.

    Raises:
        ModelError: logits are NaN or infinite.
    """
    loaded, kv = runner.loaded, SequenceKv.open(runner.pool, [])
    tokens = _check_tokens(loaded.vocabulary_size)[0][:SHARED]
    try:
        logits = runner.forward([Segment(kv, tokens, None, range(len(tokens)))])
    finally:
        kv.release()
    _check_finite(logits, loaded.kind, loaded.dtype)


def _check_finite(logits: torch.Tensor, kind: str, dtype: torch.dtype) -> None:
    if not logits.isfinite().all():
        raise ModelError(
            f"model: logits of {kind} in {dtype} are NaN or infinite; set another dtype, or repair its "
            "weights"
        )


def _run_plain(network: PreTrainedModel, context_length: int, fp8_kv: bool) -> Plain:
    tokens = _check_tokens(network.config.get_text_config().vocab_size)
    cache: dict[str, Any] = {"past_key_values": RoundedCache(config=network.config)} if fp8_kv else {}
    logits, output = _own_logits(network, torch.tensor(tokens, device=network.device), cache)
    if output.past_key_values is None:
        raise ModelError(
            f"model: {type(network).__name__} keeps no keys and values of earlier tokens, like an encoder; "
            "use a decoder-only model"
        )
    calls = attention_calls(network)
    if not calls:
        raise no_interface(network)
    geometry = geometry_of(calls)
    windows = seen = {i: call.window for i, call in calls.items()}
    if not has_known_attention(network):  # GPT-Neo's cache knows of no windows
        windows = _windows(geometry, output.past_key_values.layers)
    _check_windows(type(network).__name__, seen, windows, context_length)
    return Plain(
        tokens=tokens,
        logits=logits,
        geometry=geometry,
        windows=windows,
        instead=embedded_instead(network),
        observed=[] if None in geometry.places else observed(network, context_length - 1),
        rounding=_moved_by_rounding(network, tokens, logits),
    )


def _moved_by_rounding(
    network: PreTrainedModel, tokens: list[list[int]], logits: torch.Tensor
) -> torch.Tensor | None:
    """Return `Plain.rounding` of a model that has these logits [R, T, V] by itself."""
    if network.dtype == torch.float32 or not any(hasattr(module, "experts") for module in network.modules()):
        return None
    generator, ulp = torch.Generator().manual_seed(0), torch.finfo(network.dtype).eps

    def jittered(_: Any, __: Any, rows: torch.Tensor) -> torch.Tensor:
        jitter = torch.rand(rows.shape, generator=generator).to(rows.device) - 0.5
        return (rows.float() * (1 + 2 * ulp * jitter)).to(rows.dtype)

    embeddings: Any = network.get_input_embeddings()
    hook = embeddings.register_forward_hook(jittered)
    try:
        moved, _ = _own_logits(network, torch.tensor(tokens * JITTERS, device=network.device), {})
    finally:
        hook.remove()
    return _distances(moved.view(JITTERS, *logits.shape), logits).amax(0)


def _own_logits(
    network: PreTrainedModel, tokens: torch.Tensor, cache: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Return the logits [R, T, V] float32 of tokens [R, T], and the model's last output.

    With recurrent layers the first PROMPT tokens are computed together and the others one by one, as in the
    check: modules may compute the two differently (Nemotron H bounds its time steps only in prompts).
    """
    prompt = PROMPT if recurrent_modules(network) else tokens.shape[1]
    outputs = [network(tokens[:, :prompt], use_cache=True, **cache)]
    for at in range(prompt, tokens.shape[1]):
        token, earlier = tokens[:, at : at + 1], outputs[-1].past_key_values
        position = torch.full_like(token, at)  # Bamba counts positions wrongly
        outputs.append(network(token, position_ids=position, past_key_values=earlier, use_cache=True))
    return torch.cat([output.logits for output in outputs], 1).float(), outputs[-1]


def _windows(geometry: Geometry, cached: Sequence[Any]) -> dict[int, int | None]:
    """Return the window of each layer. Layers that share keys have that of the first, the only one in the
    cache."""
    places = geometry.places or [(0, layer) for layer in range(geometry.num_layers)]
    owners = {i: cached[places.index(place)] for i, place in enumerate(places) if place is not None}
    return {i: owner.sliding_window if owner.is_sliding else None for i, owner in owners.items()}


def moved_by_fp8(network: PreTrainedModel, plain: Plain, context_length: int) -> float:
    """Return how far rounded keys and values move the check's logits, relative to the logits' spread."""
    return _distance(plain.logits, run_plain(network, context_length).logits, exact=False)


def check_paged(
    loaded: LoadedModel,
    plain: Plain,
    strictness: float = 1.0,
    prepare: Callable[[ModelRunner], None] = lambda runner: None,
) -> None:
    """Run the check's sequences over pages and compare.

    `strictness` divides the tolerance of 16-bit dtypes; above 1 it leaves no room for `Plain.rounding`.
    `prepare` is called with the runner, which has CHECK_PAGES pages of CHECK_PAGE_SIZE, before it computes
    them.

    Raises:
        ModelError: the results differ, or the model does not run this way.
    """
    kind, exact, rounding = loaded.kind, loaded.dtype == torch.float32, plain.rounding
    if not exact and loaded.fp8_kv:
        strictness /= FP8_NOISE
    tolerance = TOLERANCE[loaded.dtype] / (1.0 if exact else strictness)
    try:
        runner = make_runner(loaded, CHECK_PAGES, CHECK_PAGE_SIZE)
        prepare(runner)
        with WideLinears():
            results = _run_paged(runner, plain.tokens)
            if runner.has_forward_of_one:
                results.append(_one_by_one(runner, plain.tokens))
    except _RUN_ERRORS as error:
        raise without_room(error) or ModelError(
            f"model: {kind} does not run over paged memory ({error}); use another architecture"
        ) from error
    for what, rows, logits in results:
        expected = torch.stack([plain.logits[sequence, position] for sequence, position in rows])
        distance, accepted = _distance(logits, expected, exact), tolerance
        if rounding is not None and strictness <= 1.0:
            moved = torch.stack([rounding[row] for row in rows]).median().item()
            accepted = max(tolerance, min(ROUNDING_FACTOR * moved, MAX_ROUNDING))
        if not distance <= accepted:  # also catches NaN
            unknown = ", ".join(sorted(runner.attention.unknown))
            because = f"; its attention asks for {unknown}" if unknown else ""
            raise ModelError(
                f"model: {kind} gives other logits over paged memory ({what}: {distance:.2g} off{because}); "
                "use another architecture"
            )


def _check_tokens(vocabulary_size: int) -> list[list[int]]:
    """Return R sequences of random tokens. 0, 1 and 2 begin with the same tokens; 0 and 2 share two tokens
    more."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(vocabulary_size, (SEQUENCES, LENGTH), generator=generator).tolist()
    rows[1][:SHARED] = rows[0][:SHARED]
    rows[2][: SHARED + 2] = rows[0][: SHARED + 2]
    return rows


def _run_paged(runner: ModelRunner, tokens: list[list[int]]) -> list[Result]:
    """Compute two prefill chunks, a tree, a commit with compaction and survivors, and a ragged batch."""
    kv, other = SequenceKv.open(runner.pool, []), SequenceKv.open(runner.pool, [])
    results: list[Result] = []

    def forward(what: str, segments: list[Segment], rows: list[tuple[int, int]]) -> None:
        logits = runner.forward(segments)
        for part in torch.split(logits, [len(segment.wanted) for segment in segments]):  # each by itself
            results.append((what, rows[: len(part)], part))
            rows = rows[len(part) :]

    forward(
        "first chunk", [Segment(kv, tokens[0][:7], None, range(7), certain=7)], [(0, i) for i in range(7)]
    )
    second = [(0, position) for position in range(7, PROMPT)]
    forward(
        "second chunk",
        [Segment(kv, tokens[0][7:PROMPT], None, range(PROMPT - 7), certain=PROMPT - 7)],
        second,
    )
    runner.commit(kv, range(PROMPT), tokens[0][:PROMPT])
    # Sequences 0, 1 and 2 form a tree, listed level by level: [root, 0 1, 0 1, 0 1 2, 0 1 2, 0 1 2]
    nodes = [(0, PROMPT), (0, 13), (1, 13), (0, 14), (1, 14)]
    nodes += [(row, position) for position in (15, 16, 17) for row in (0, 1, 2)]
    parents = [-1, 0, 0, 1, 2, 3, 4, 3, 5, 6, 7, 8, 9, 10]
    branch = [tokens[row][position] for row, position in nodes]
    forward("tree", [Segment(kv, branch, parents, range(len(nodes)))], nodes)
    runner.commit(kv, [0, 1, 3, 7], tokens[2][PROMPT:16], survivors=[10, 13])
    rest = LENGTH - 18
    forward(
        "ragged batch",
        [
            Segment(kv, tokens[2][18:], None, range(rest)),
            Segment(other, tokens[3], None, range(LENGTH), certain=PROMPT),
        ],
        [(2, position) for position in range(18, LENGTH)] + [(3, position) for position in range(LENGTH)],
    )
    return results


def _one_by_one(runner: ModelRunner, tokens: list[list[int]]) -> Result:
    """Compute the last tokens of sequence 1 one by one."""
    kv, last = SequenceKv.open(runner.pool, []), range(PROMPT, LENGTH)
    runner.forward([Segment(kv, tokens[1][:PROMPT], None, [PROMPT - 1], certain=PROMPT)])
    alone = [runner.forward([Segment(kv, [tokens[1][position]], None, [0])]) for position in last]
    return "tokens one by one", [(1, position) for position in last], torch.cat(alone)


def _distance(logits: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    """Return the distance of logits [..., V], relative to the spread of the expected ones.

    It is that of the worst row if arithmetic is `exact`. Otherwise it is the median, because in 16 bits a
    router that chooses between nearly equal experts chooses another one now and then.
    """
    distances = _distances(logits, expected)
    return float(distances.max() if exact else distances.median())


def _distances(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [...], the distance of each row. A token of zeros, as padding often is, may have logits without
    a spread."""
    spread = torch.linalg.vector_norm(expected - expected.mean(-1, keepdim=True), dim=-1)
    least = torch.finfo(spread.dtype).tiny
    distances: torch.Tensor = torch.linalg.vector_norm(logits - expected, dim=-1) / spread.clamp(min=least)
    return distances


def _check_windows(
    kind: str, seen: dict[int, int | None], expected: dict[int, int | None], context_length: int
) -> None:
    """Compare the windows of attention with the cache's: the check's sequences are shorter than most
    windows."""
    for layer, window in expected.items():
        given = seen.get(layer)
        if given != window and min(given or context_length, window or context_length) < context_length:
            raise ModelError(
                f"model: layer {layer} of {kind} attends over a window of {given}, its cache keeps {window}; "
                f"use another architecture or a context_length up to {window or given}"
            )
