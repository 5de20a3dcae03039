"""Changes logits before the temperature is applied: by penalties, biases and masks, in that order.

    repetition   tokens of prompt and output: logit / penalty when positive, x penalty when negative
                 (Keskar et al. 2019, as in transformers)
    frequency    - penalty x count in the output (OpenAI)
    presence     - penalty when in the output (OpenAI)
    bias         + bias of the token
    min_tokens   end and stop tokens cannot be chosen before this many are generated
    mask         tokens that the grammar does not allow there cannot be chosen

A text that its grammar does not let continue ends, whatever min_tokens and ignore_eos say.

Shapes: N rows, V vocabulary, E (row, token) pairs that a penalty changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.protocol.messages import SamplingParams
from outrider.sampling.history import History, Path

NO_TOKEN = -2
"""What is chosen at a row whose logits are all NaN or -inf."""


class SamplingRow(NamedTuple):
    """Everything that the choice at one row of logits depends on besides the logits."""

    params: SamplingParams
    position: int
    """Absolute position of the token being chosen; 0 is the first prompt token."""
    generated: int
    """Number of tokens generated before it on this path."""
    history: History | Path
    mask: bytes | None = None
    """The tokens that the constraint of `params` allows, one bit each (`outrider.grammar.matcher.Mask`);
    None: all."""


def plain(rows: Sequence[SamplingRow]) -> bool:
    """True if `processed` changes nothing for these rows."""
    last, min_tokens = None, 0
    for row in rows:
        params = row.params
        if params is not last:  # rows of one session share their params
            if params.penalised or params.logit_bias or params.constraint is not None:
                return False
            last, min_tokens = params, params.min_tokens
        if row.generated < min_tokens:
            return False
    return True


def processed(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> Tensor:
    """Logits [N, V] after penalties, biases and masks; the same tensor if no row has any.

    Token ids beyond V are skipped: the output layers of draft and target may be padded differently.
    """
    if plain(rows):
        return logits
    penalised = [index for index, row in enumerate(rows) if row.params.penalised]
    biased = [index for index, row in enumerate(rows) if row.params.logit_bias]
    constrained = [index for index, row in enumerate(rows) if row.mask is not None]
    masked = [
        index for index, row in enumerate(rows) if row.generated < row.params.min_tokens and row.mask is None
    ]
    logits = logits.clone()
    if penalised:
        _penalise(logits, rows, penalised)
    if biased:
        _add_biases(logits, rows, biased)
    if masked:
        _mask_ends(logits, rows, masked, eos_token_ids)
    if constrained:
        _constrain(logits, rows, constrained, eos_token_ids)
    return logits


def comparable(logits: Tensor) -> Tensor:
    """The logits with NaN as -inf, as the CPU's kernels have it, and infinity as the largest number: the
    distance of two infinities is NaN."""
    return logits.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


class _Entries(NamedTuple):
    """Tokens of some rows with their counts in the output; all [E]."""

    rows: Tensor
    tokens: Tensor
    counts: Tensor


def _penalise(logits: Tensor, rows: Sequence[SamplingRow], penalised: list[int]) -> None:
    # A path's tokens may be in its base too: both are computed from the untouched logits, and the
    # path's result is written last.
    both = [
        _within(entries, logits)
        for entries in (_history_entries(rows, penalised), _path_entries(rows, penalised))
    ]
    values = [_penalised_values(logits, entries, rows) for entries in both]
    for entries, value in zip(both, values, strict=True):
        logits[entries.rows, entries.tokens] = value


def _penalised_values(logits: Tensor, entries: _Entries, rows: Sequence[SamplingRow]) -> Tensor:
    """New logits [E] of the entries."""

    def parameter(name: str) -> Tensor:
        values = torch.tensor([getattr(row.params, name) for row in rows], device=logits.device)
        return values.index_select(0, entries.rows)

    values = logits[entries.rows, entries.tokens]
    repetition = parameter("repetition_penalty")
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= parameter("frequency_penalty") * entries.counts
    return values.sub_(parameter("presence_penalty") * (entries.counts > 0))


def _history_entries(rows: Sequence[SamplingRow], penalised: list[int]) -> _Entries:
    counted = [rows[index].history.counts() for index in penalised]
    lengths = torch.tensor([len(tokens) for tokens, _ in counted])
    return _Entries(
        torch.tensor(penalised).repeat_interleave(lengths),
        torch.cat([tokens for tokens, _ in counted]),
        torch.cat([counts for _, counts in counted]),
    )


def _path_entries(rows: Sequence[SamplingRow], penalised: list[int]) -> _Entries:
    entries = [
        (index, token, count) for index in penalised for token, count in rows[index].history.changes().items()
    ]
    table = torch.tensor(entries, dtype=torch.float64).view(-1, 3)
    return _Entries(table[:, 0].long(), table[:, 1].long(), table[:, 2].float())


def _within(entries: _Entries, logits: Tensor) -> _Entries:
    """The entries whose tokens are in the vocabulary, on the logits' device."""
    inside = entries.tokens < logits.shape[1]
    if not inside.all():
        entries = _Entries(*(column[inside] for column in entries))
    return _Entries(*(column.to(logits.device) for column in entries))


def _add_biases(logits: Tensor, rows: Sequence[SamplingRow], biased: list[int]) -> None:
    pairs = [(index, token) for index in biased for token in rows[index].params.logit_bias]
    biases = [bias for index in biased for bias in rows[index].params.logit_bias.values()]
    counts = torch.tensor(biases, dtype=torch.float32)
    where = torch.tensor(pairs, dtype=torch.int64)
    entries = _within(_Entries(where[:, 0], where[:, 1], counts), logits)
    logits[entries.rows, entries.tokens] += entries.counts


def _mask_ends(
    logits: Tensor, rows: Sequence[SamplingRow], masked: list[int], eos_token_ids: Collection[int]
) -> None:
    size = logits.shape[1]
    for index in masked:
        ends = [token for token in (*eos_token_ids, *rows[index].params.stop_token_ids) if token < size]
        logits[index, ends] = -torch.inf


def _constrain(
    logits: Tensor, rows: Sequence[SamplingRow], constrained: list[int], eos_token_ids: Collection[int]
) -> None:
    allowed = np.stack([_allowed(rows[index], logits.shape[1], eos_token_ids) for index in constrained])
    where = torch.from_numpy(~allowed).to(logits.device)
    logits[constrained] = logits[constrained].masked_fill_(where, -torch.inf)


def _allowed(row: SamplingRow, size: int, eos_token_ids: Collection[int]) -> NDArray[np.bool_]:
    """Which of `size` tokens may be chosen: those of the mask, without end tokens that come too early."""
    assert row.mask is not None
    bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), count=size, bitorder="little")
    allowed = bits.view(np.bool_)
    params, early = row.params, row.generated < row.params.min_tokens
    barred = [*eos_token_ids] if early or params.ignore_eos else []
    barred += params.stop_token_ids if early else ()
    if not barred:
        return allowed
    later = allowed.copy()
    later[[token for token in barred if token < size]] = False
    return later if later.any() else allowed
