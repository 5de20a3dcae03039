"""The tokenizer that a model brings, and the hash that draft and target must share."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import AutoTokenizer

from outrider.engine.loading.tokenizer_files import load_tokenizer, vocabulary_hash
from outrider.grammar.vocabulary import load_vocabulary
from outrider.protocol.errors import ModelError
from tests.models import BOS, EOS, build_tokenizer

Folders = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and no model."""
    build_tokenizer(tmp_path)
    return tmp_path


def test_what_a_folder_holds(folder: Path) -> None:
    """The tokenizer, its special tokens by role and no template."""
    files = load_tokenizer(str(folder))
    assert files is not None
    own = (folder / "tokenizer.json").read_bytes()
    assert vocabulary_hash(files.tokenizer_json, 300) == vocabulary_hash(own, 300)
    assert files.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert files.chat_template == ""


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    """Token ids alone can still be served."""
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ x }}",
        {"tools": "no", "default": "{{ x }}"},
        [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ x }}"}],
    ],
)
def test_a_chat_template_in_the_settings(folder: Path, template: object) -> None:
    """One template, or the default of several."""
    settings = {"chat_template": template, "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    files = load_tokenizer(str(folder))
    assert files is not None
    assert files.chat_template == "{{ x }}"
    assert files.special_tokens == {"eos_token": "</s>"}


def test_a_chat_template_in_its_own_file(folder: Path) -> None:
    """chat_template.jinja goes before the settings."""
    (folder / "chat_template.jinja").write_text("{{ own }}")
    files = load_tokenizer(str(folder))
    assert files is not None
    assert files.chat_template == "{{ own }}"


@pytest.mark.parametrize("in_files", [False, True])
def test_a_chat_template_for_tools(folder: Path, in_files: bool) -> None:
    """Of several templates the one that transformers takes for conversations with tools, wherever it is."""
    named = {"default": "{{ x }}", "rag": "{{ y }}", "tool_use": "{{ tools }}"}
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        for name, template in named.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)
        (folder / "chat_template.jinja").write_text(named["default"])
    else:
        entries = [{"name": name, "template": template} for name, template in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    files = load_tokenizer(str(folder))
    assert files is not None
    assert (files.chat_template, files.tool_chat_template) == ("{{ x }}", "{{ tools }}")
    chosen = AutoTokenizer.from_pretrained(str(folder))
    assert chosen.get_chat_template(tools=[{}]) == files.tool_chat_template
    assert chosen.get_chat_template() == files.chat_template


@pytest.mark.parametrize("settings", [{}, {"legacy": True}, {"legacy": False}, {"pad_token": "<pad>"}])
def test_prompts_of_llama_are_those_of_transformers(tmp_path: Path, settings: dict[str, object]) -> None:
    """The class splits text in a way of its own, at the beginning and behind special tokens."""
    vocabulary = {token: id for id, token in enumerate(["<unk>", BOS, EOS, "\u2581", "h", "i", "\u2581h"])}
    merges = [("\u2581", "h")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "bos_token": BOS, "eos_token": EOS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = load_tokenizer(str(tmp_path))
    assert files is not None
    read = Tokenizer.from_str(files.tokenizer_json.decode())
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("hi", " hi", f"hi{EOS}hi", f"{BOS} hi{EOS} hi"):
        assert read.encode(text).ids == theirs(text)["input_ids"]
    own = (tmp_path / "tokenizer.json").read_bytes()
    assert vocabulary_hash(files.tokenizer_json, 7) == vocabulary_hash(own, 7)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_a_setting_that_transformers_ignores(folder: Path, name: str) -> None:
    """With a tokenizer.json, add_bos_token puts nothing in front of a prompt."""
    settings = {"tokenizer_class": name, "bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    files = load_tokenizer(str(folder))
    assert files is not None
    ids = Tokenizer.from_str(files.tokenizer_json.decode()).encode("hello").ids
    assert ids == AutoTokenizer.from_pretrained(str(folder))("hello")["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"300": {"content": "<|user|>", "special": True}}},
        {"added_tokens_decoder": {"1": {"content": EOS, "rstrip": True, "special": True}}},
        {"extra_special_tokens": ["<|user|>", "rides"]},
        {"eos_token": "<|user|>"},
    ],
)
def test_tokens_that_only_the_settings_name(folder: Path, settings: dict[str, object]) -> None:
    """Prompts have the ids of transformers, where the model has these ids; it has no others."""
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    text = f"<|user|>a scout rides{EOS} ahead<|user|>"
    for size, same in ((310, True), (300, "<|user|>" not in str(settings))):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
        files = load_tokenizer(str(folder))
        assert files is not None
        ids = Tokenizer.from_str(files.tokenizer_json.decode()).encode(text).ids
        assert (ids == AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"]) is same
        assert max(ids) < size


@pytest.mark.parametrize(
    ("settings", "special"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, {}),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None}, {"bos_token": BOS}),
        ({"extra_special_tokens": {"user_token": EOS}, "bos_token": BOS}, {}),
    ],
)
def test_templates_have_the_special_tokens_of_transformers(
    folder: Path, settings: dict[str, object], special: dict[str, object]
) -> None:
    """Those of the tokenizer's class too, those of the older file where the settings have null, and others
    that have a name."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    files = load_tokenizer(str(folder))
    assert files is not None
    assert files.special_tokens == AutoTokenizer.from_pretrained(str(folder)).special_tokens_map
    assert files.special_tokens


def test_broken_settings_are_refused(folder: Path) -> None:
    """The sentence names the file."""
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json .* is not JSON"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("content", [b'{"a":', b'{"a": 1}', b"[1]", b"\xff\xfe{"])
def test_a_broken_tokenizer_is_refused(content: bytes) -> None:
    """With a sentence; until then constraints are refused with a warning."""
    assert load_vocabulary(content, [0]) is None
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        vocabulary_hash(content, 300)


def test_a_template_that_is_no_text_is_refused(folder: Path) -> None:
    """Files in another encoding are named."""
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja of .* is not UTF-8"):
        load_tokenizer(str(folder))


def test_the_hash_is_of_the_tokens_not_of_the_padding(folder: Path) -> None:
    """Two sizes of output layer over one tokenizer are the same vocabulary."""
    content = (folder / "tokenizer.json").read_bytes()
    assert vocabulary_hash(content, 300) == vocabulary_hash(content, 320)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2", "gemma3_text", "llama"])
def test_the_vocabulary_does_not_depend_on_the_class_of_tokenizer(folder: Path, kind: str) -> None:
    """Classes of transformers add tokens of their own where the output layer is padded; no file has them."""
    own = vocabulary_hash((folder / "tokenizer.json").read_bytes(), 300)
    for size in (300, 320):
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": size}))
        files = load_tokenizer(str(folder))
        assert files is not None
        assert vocabulary_hash(files.tokenizer_json, size) == own


def test_another_token_is_another_vocabulary(folder: Path) -> None:
    """One more token changes the hash."""
    content = (folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.add_tokens(["<new>"])
    assert vocabulary_hash(tokenizer.to_str().encode(), 300) != vocabulary_hash(content, 300)


def test_without_tokenizer_only_the_size_counts() -> None:
    """It is all there is to compare."""
    assert vocabulary_hash(None, 300) == "size:300"


def test_an_older_format_is_converted(folder: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 came with, give the same ids as the tokenizer.json made of them."""
    older = tmp_path / "older"
    older.mkdir()
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(older))
    (older / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    files = load_tokenizer(str(older))
    assert files is not None
    text = "a scout rides ahead"
    newer = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert (
        Tokenizer.from_str(files.tokenizer_json.decode()).encode(text, add_special_tokens=False).ids == newer
    )


def _tiktoken() -> str:
    """A vocabulary of single bytes, and their pairs from the beginning of the alphabet."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"cd"]
    return "\n".join(f"{b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))


def _tekken() -> str:
    """The same vocabulary in Mistral's format."""
    words = (line.split() for line in _tiktoken().splitlines())
    vocab = [{"rank": int(rank), "token_bytes": word, "token_str": None} for word, rank in words]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate((BOS, EOS))]
    config = {
        "pattern": r"\p{L}+|[^\p{L}]+",
        "num_vocab_tokens": 258,
        "default_vocab_size": 260,
        "default_num_special_tokens": 2,
    }
    return json.dumps({"config": config, "vocab": vocab, "special_tokens": special})


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.model", _tiktoken()), ("tiktoken.model", _tiktoken()), ("tekken.json", _tekken())],
)
def test_other_formats_are_read_as_transformers_reads_them(tmp_path: Path, name: str, content: str) -> None:
    """Texts have the ids of transformers."""
    (tmp_path / name).write_text(content)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    files = load_tokenizer(str(tmp_path))
    assert files is not None
    ids = Tokenizer.from_str(files.tokenizer_json.decode()).encode("abacus cd").ids
    assert ids == AutoTokenizer.from_pretrained(str(tmp_path))("abacus cd")["input_ids"]


def test_code_of_a_tokenizer_is_never_run_nor_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokenizer.json is used, or else the model has no tokenizer, and a warning says so."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asks on the terminal"))
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(folder)) is not None
    (folder / "tokenizer.json").rename(folder / "tiktoken.model")
    assert load_tokenizer(str(folder)) is None
    assert "requests need token ids" in caplog.text


def test_a_tokenizer_in_python_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says that the model has no tokenizer."""
    (tmp_path / "vocab.txt").write_text("<|a|>\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)) is None
    assert "ByT5Tokenizer is written in Python" in caplog.text


def test_files_that_the_tokenizers_class_does_not_read(folder: Path, tmp_path: Path) -> None:
    """Transformers then makes a tokenizer of special tokens alone, which is not served."""
    older = tmp_path / "older"
    older.mkdir()
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(older))
    (older / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (older / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"LlamaTokenizer does not read the files .*; add"):
        load_tokenizer(str(older))


def test_an_older_format_that_cannot_be_read(tmp_path: Path) -> None:
    """The sentence says what to install, in a version that runs with the locked protobuf, or to add."""
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelError, match=r"add its tokenizer\.json, or install the package .*'sentencepiece<0\.2\.3'"
    ):
        load_tokenizer(str(tmp_path))
