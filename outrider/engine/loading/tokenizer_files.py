"""The tokenizer that comes with a model, as files that another process can use without this one."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from outrider.engine.loading.model_path import check_model_path, find_file
from outrider.protocol.errors import ModelError, first_line
from outrider.protocol.vocabulary import ONLY_SIZE

log = logging.getLogger(__name__)

OLDER_FILES = (
    *("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
    *("tiktoken.model", "tekken.json"),
)
"""Files of which any means a tokenizer in another format than `tokenizer.json`."""
SENTENCEPIECE = "sentencepiece<0.2.3"
"""The package for files of sentencepiece: from 0.2.3 on it takes a newer protobuf than is locked."""
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that may name tokens beside `tokenizer.json`."""
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
"""Files of chat templates, by the names that `transformers` uses."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What is needed to turn text and chat messages into token ids and back."""

    tokenizer_json: bytes
    chat_template: str = ""
    """Jinja source; empty: the model has no chat template."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """The special tokens by role, such as bos_token and eos_token; chat templates refer to them."""
    tool_chat_template: str = ""
    """Jinja source for conversations with tools; empty: `chat_template` is used for these too."""


def load_tokenizer(model: str) -> TokenizerFiles | None:
    """Return the tokenizer of a model folder or hub id, as `AutoTokenizer` makes it from its files; None if
    there is none.

    With a tokenizer.json `AutoTokenizer` does not obey `add_bos_token`, so this does not either.

    Raises:
        ModelError: there is no such model, or a file exists but cannot be read.
    """
    check_model_path(model)
    own = _file(model, "tokenizer.json")
    theirs = _as_transformers(model, own)
    tokenizer_json = own if theirs is None else _written(model, own, theirs)
    if tokenizer_json is None:
        return None
    settings = json_file(model, "tokenizer_config.json")
    templates = _templates(model, settings)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=templates.get("default", ""),
        special_tokens=_special_tokens(model, settings) if theirs is None else theirs.special_tokens_map,
        tool_chat_template=templates.get("tool_use", ""),
    )


def vocabulary_hash(tokenizer_json: bytes | None, vocabulary_size: int) -> str:
    """Return the hash of what draft and target must agree on: the text of every token id.

    The size of the output layer does not count when there is a tokenizer, because models of one family
    pad it differently. Without a tokenizer there is only the size.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    if tokenizer_json is None:
        return f"{ONLY_SIZE}{vocabulary_size}"
    try:
        vocabulary = Tokenizer.from_str(tokenizer_json.decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # what the library raises
        raise ModelError(
            f"model: its tokenizer.json cannot be read ({first_line(error)}); repair it"
        ) from error
    listing = json.dumps(sorted(vocabulary.items()), ensure_ascii=True, separators=(",", ":"))
    return "tokens:" + hashlib.sha256(listing.encode()).hexdigest()[:32]


def _as_transformers(model: str, own: bytes | None) -> Any:
    """Return the tokenizer that `AutoTokenizer` makes; None if there are no files for one, or if it can use
    only the files themselves: it fails for a model's own code, or without a config.json.

    Raises:
        ModelError: it cannot be read, and there is no tokenizer.json to use as it is.
    """
    if own is None and not any(_file(model, name) is not None for name in OLDER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import

    try:
        # If this is not said, it asks on the terminal whether to run a model's own code.
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # what the library raises
        if own is None and "trust_remote_code" not in str(error):
            raise _unreadable(model, first_line(error)) from error
        _warn(model, own, f"AutoTokenizer cannot read its files ({first_line(error)})")
        return None
    kind = type(tokenizer).__name__
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        _warn(model, own, f"its {kind} is written in Python, which the orchestrator does not run")
        return None
    if own is None and len({*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}) <= 1:
        raise _unreadable(model, f"its {kind} does not read the files that are there")
    return tokenizer


def _warn(model: str, own: bytes | None, reason: str) -> None:
    """Say what is used instead of the tokenizer of transformers."""
    used = "no tokenizer, so requests need token ids" if own is None else "tokenizer.json as it is"
    log.warning("%s: %s: %s", model, used, reason)


def _unreadable(model: str, reason: str) -> ModelError:
    return ModelError(
        f"model: the tokenizer of {model!r} cannot be read ({reason}); add its tokenizer.json, or install "
        f"the package that its format takes ('{SENTENCEPIECE}' or tiktoken)"
    )


def _written(model: str, own: bytes | None, theirs: Any) -> bytes:
    """Return a tokenizer of transformers as a tokenizer.json.

    Its class and tokenizer_config.json may split text in their own way, and add tokens. Those that are not
    in the model's own file are left out if the model has no such ids, or if no other file names them: a class
    adds its usual ones wherever the output layer is padded, which would make the vocabulary depend on that.
    """
    made = json.loads(theirs.backend_tokenizer.to_str())
    if own is not None:
        known = set(Tokenizer.from_str(own.decode()).get_vocab(with_added_tokens=True))
        size = _vocabulary_size(json_file(model, "config.json"))
        named = {text for name in NAMING_FILES for text in _texts(json_file(model, name))}
        made["added_tokens"] = [
            token
            for token in made["added_tokens"]
            if token["content"] in known or (token["content"] in named and token["id"] < size)
        ]
    return json.dumps(made, ensure_ascii=False).encode()


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _vocabulary_size(config: Mapping[str, Any]) -> int:
    """Return how many token ids a model has by its config.json; 0 if that does not say."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    sizes = (part.get("vocab_size") for part in parts)
    return next((size for size in sizes if isinstance(size, int)), 0)


def _special_tokens(model: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in the files of a model, which AutoTokenizer cannot read, by role."""
    return {
        name: text
        for name, value in {**json_file(model, "special_tokens_map.json"), **settings}.items()
        if name.endswith("_token") and (text := _token_text(value))
    }


def _file(model: str, name: str) -> bytes | None:
    """Return the content of a file of a model folder or hub id; None if it has no such file."""
    path = find_file(model, name)
    return path.read_bytes() if path is not None else None


def json_file(model: str, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder or hub id; empty if it has no such file.

    Raises:
        ModelError: the file is not JSON that transformers reads, or no object.
    """
    content = _file(model, name)
    if content is not None and content.startswith(codecs.BOM_UTF8):  # which transformers does not read
        raise ModelError(f"model: {name} of {model!r} begins with a byte order mark; save it without one")
    try:
        values = json.loads(content) if content is not None else {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model: {name} of {model!r} is not JSON; repair or remove it") from error
    if not isinstance(values, dict):
        raise ModelError(f"model: {name} of {model!r} is no JSON object; repair or remove it")
    return values


def _templates(model: str, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Files take precedence over tokenizer_config.json, which may have one
    or several templates."""
    files = {name: content for name, path in TEMPLATE_FILES.items() if (content := _file(model, path))}
    if files:
        return {name: _text(model, TEMPLATE_FILES[name], content) for name, content in files.items()}
    found = settings.get("chat_template")
    if isinstance(found, dict):
        return {name: text for name, text in found.items() if isinstance(text, str)}
    if isinstance(found, list):
        named = [(entry.get("name"), entry.get("template")) for entry in found if isinstance(entry, dict)]
        return {str(name): text for name, text in named if isinstance(text, str)}
    return {"default": found} if isinstance(found, str) else {}


def _text(model: str, name: str, template: bytes) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"model: {name} of {model!r} is not UTF-8; repair or remove it") from error


def _token_text(value: Any) -> str:
    """Return the text of a special token, which is written as text or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
