"""Checks from their files whether two models share a vocabulary."""

from __future__ import annotations

from outrider.protocol.errors import ConfigError


def check_vocabulary(target: str, draft: str, sizes: tuple[int, int] = (0, 0)) -> None:
    """Refuse a draft whose tokens are not the target's; without tokenizers, compare the vocabularies'
    `sizes`.

    Raises:
        ConfigError: the tokens differ; names the draft.
    """
    from outrider.engine.loading.tokenizer_files import load_tokenizer, vocabulary_hash

    files = [load_tokenizer(model) for model in (target, draft)]
    hashes = {
        vocabulary_hash(file.tokenizer_json if file else None, size)
        for file, size in zip(files, sizes, strict=True)
    }
    if len(hashes) > 1:
        raise ConfigError(
            f"--draft: the vocabulary of {draft!r} is not that of {target!r}; use a draft with the target's "
            "tokenizer"
        )
