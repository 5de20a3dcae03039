"""Turns prompts into the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from outrider.cli.bench.target import Prompt
from outrider.engine.loading.model_path import is_utf8
from outrider.protocol.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def token_ids_of(prompts: Sequence[Prompt], model: str) -> list[tuple[int, ...]]:
    """The token ids of each prompt, in order; the model's tokenizer encodes those that are texts.

    Raises:
        InvalidRequest: a prompt is a conversation, or has no tokens.
        ConfigError: a prompt is a text, and the model has no tokenizer.
    """
    if any(not isinstance(prompt, str) and not isinstance(prompt[0], int) for prompt in prompts):
        raise InvalidRequest("--prompts", "must be texts or token ids, as the model gets them")
    tokenizer = _tokenizer(model) if any(isinstance(prompt, str) for prompt in prompts) else None
    ids = [_ids(prompt, tokenizer) for prompt in prompts]
    if not all(ids):
        raise InvalidRequest("--prompts", f"entry {ids.index(()) + 1} has no tokens; leave it out")
    return ids


def check_prompts(
    prompts: Sequence[Sequence[int]], tokens: int, model: str, size: int, limit: int | None
) -> None:
    """Check that a model can read each prompt and write `tokens` tokens after it; `size` is that of its
    vocabulary, and `limit` its context length; None: unknown.

    Raises:
        InvalidRequest: it cannot.
    """
    strange = next((token for ids in prompts for token in ids if not 0 <= token < size), None)
    if strange is not None:
        raise InvalidRequest(
            "--prompts",
            f"token {strange} is not in the vocabulary of {model}, which has {size}; use models with one "
            "vocabulary, and prompts of it",
        )
    longest = max(map(len, prompts)) + tokens
    if limit and longest > limit:
        raise InvalidRequest(
            "--prompts",
            f"a prompt and its text have up to {longest} tokens and {model} takes {limit}; lower --tokens, "
            "or shorten the prompts",
        )


def _ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        assert tokenizer is not None
        if not is_utf8(prompt):
            raise ConfigError("--prompts: a text has half a character (\\ud800 to \\udfff); write whole ones")
        return tuple(tokenizer.encode(prompt).ids)
    return cast("tuple[int, ...]", prompt)


def _tokenizer(model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    from outrider.engine.loading.tokenizer_files import load_tokenizer

    files = load_tokenizer(model)
    if files is None:
        raise ConfigError("--prompts: the model came without a tokenizer; give token ids")
    return Tokenizer.from_str(files.tokenizer_json.decode())
