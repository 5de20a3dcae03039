"""A text begins as it goes on behind its prompt: `decode(prompt and text)` without the text of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from orchestrator.text.spelling import BYTES
from orchestrator.text.text_stream import TextStream
from orchestrator.text.tokenizer import TextTokenizer
from tests.unit.orchestrator.text.test_text_stream import pieces_of

WORDS = ["<s>", "<end>", "<think>", "the", "cat", "s", "!", "▁the", "▁a", "▁", "▁cat", "▁▁", "##s", "the</w>"]
CHARACTERS = ("é", "日", "👍", "\ufffd")


def tokenizer_of(decoder: decoders.Decoder, added: Sequence[str] = ()) -> Tokenizer:
    """A vocabulary of words, of text and bytes of a byte-fallback vocabulary, and of byte-level signs."""
    signs = [chr(0x100 + i) for i in range(68)] + [chr(i) for i in (*range(0xA1, 0xAD), *range(0xAE, 0x100))]
    words = [*WORDS, *added, *(f"<0x{byte:02X}>" for byte in range(256)), *signs]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "<end>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def stripping(*last: decoders.Decoder) -> decoders.Decoder:
    """Of a vocabulary made by SentencePiece, as Llama 2 has it, and with nothing at the end Gemma."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


METASPACE = {
    scheme: tokenizer_of(decoders.Metaspace(prepend_scheme=scheme)) for scheme in ("first", "always", "never")
}
FALLBACK = {
    "llama": tokenizer_of(stripping(decoders.Strip(" ", 1, 0))),
    "gemma": tokenizer_of(stripping()),
}
BYTE_LEVEL = tokenizer_of(decoders.ByteLevel(), ["Ġthe", "Ġcat", "Ġ"])
OTHERS = {
    "wordpiece": tokenizer_of(decoders.WordPiece()),
    "suffix": tokenizer_of(decoders.BPEDecoder("</w>")),
    "bytes": BYTE_LEVEL,
}
ALL = METASPACE | FALLBACK | OTHERS


def ids_of(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Ids of words of the vocabulary, and of characters in byte tokens of the tokenizer's kind."""
    spelled = [[word] if word not in CHARACTERS else _bytes_of(tokenizer, word) for word in words]
    return [tokenizer.token_to_id(one) for one in chain.from_iterable(spelled)]


def _bytes_of(tokenizer: Tokenizer, character: str) -> list[str]:
    signs = {byte: sign for sign, byte in BYTES.items()}
    if tokenizer is BYTE_LEVEL:
        return [signs[byte] for byte in character.encode()]
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def plain(tokenizer: Tokenizer, tokens: Sequence[int], special: bool = False) -> str:
    """What `transformers` makes of tokens."""
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return str(plain.decode(tokens, skip_special_tokens=not special))


def behind(tokenizer: Tokenizer, prompt: Sequence[int], tokens: list[int], **options: object) -> str:
    """The text of tokens behind a prompt, one by one; resumed behind each piece it goes on the same."""
    used, special = TextTokenizer(tokenizer.to_str().encode()), bool(options.pop("special", False))
    stream = partial(
        TextStream,
        partial(used.decode, special_tokens=special),
        used.byte_tokens,
        has_no_text=partial(used.has_no_text, special_tokens=special),
        prompt=used.end_of(prompt, special),
        **options,  # type: ignore[arg-type]
    )
    whole = pieces_of(stream(), tokens, [])
    text = "".join(piece.text for piece in whole)
    if not options:
        assert sum(piece.tokens for piece in whole) == len(tokens)
    for cut in range(1, len(whole) + 1):
        had = tokens[: sum(piece.tokens for piece in whole[:cut])]
        rest = stream(resumed=had)
        pieces = [*whole[:cut], *([] if rest.stop else pieces_of(rest, tokens[len(had) :], []))]
        assert "".join(piece.text for piece in pieces) == text
    return text


@pytest.mark.parametrize(
    ("name", "prompt", "words", "expected"),
    [
        ("llama", ["<s>", "▁the"], ["▁cat", "s"], " cats"),
        ("llama", ["<s>"], ["▁cat", "s"], "cats"),
        ("llama", ["<s>", "▁the", "<end>"], ["▁cat"], " cat"),
        ("llama", ["▁"], ["▁cat"], " cat"),
        ("llama", ["▁the", "👍"], ["▁cat"], " cat"),
        ("first", ["<s>", "▁the"], ["▁cat"], " cat"),
        ("always", ["▁the"], ["▁cat"], " cat"),
        ("never", ["<s>"], ["▁cat"], " cat"),
        ("gemma", ["<s>"], ["▁cat"], " cat"),
        ("wordpiece", ["<s>", "the"], ["cat", "##s", "!"], " cats!"),
        ("wordpiece", ["<s>"], ["cat", "##s"], "cats"),
        ("suffix", ["the", "the</w>"], ["cat"], " cat"),
        ("suffix", ["the"], ["the</w>"], "the"),
        ("bytes", ["the"], ["Ġcat", "s"], " cats"),
        ("bytes", ["<s>"], ["Ġcat"], " cat"),
        ("bytes", ["the"], ["cat"], "cat"),
    ],
)
def test_the_space_behind_the_prompt_is_there(
    name: str, prompt: list[str], words: list[str], expected: str
) -> None:
    """As `transformers` has it; with a special token alone before, the first space is dropped as ever."""
    tokenizer = ALL[name]
    before, tokens = ids_of(tokenizer, prompt), ids_of(tokenizer, words)
    assert behind(tokenizer, before, tokens) == expected
    assert plain(tokenizer, before) + expected == plain(tokenizer, before + tokens)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", list(ALL))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_text_are_what_all_tokens_are(name: str, special: bool, data: st.DataObject) -> None:
    """Whatever the decoder, wherever prompt and text meet between characters, special tokens shown or not."""
    tokenizer = ALL[name]
    shown = CHARACTERS if tokenizer is BYTE_LEVEL or name in FALLBACK else ()
    words = st.sampled_from([*WORDS, *shown])
    first = data.draw(st.sampled_from(WORDS))  # see test_a_prompt_of_byte_tokens_alone
    prompt = ids_of(tokenizer, [first, *data.draw(st.lists(words, max_size=6))])
    if name in FALLBACK and all(tokenizer.id_to_token(t)[:3] in ("<s>", "<en", "<0x") for t in prompt):
        prompt = [tokenizer.token_to_id("▁the"), *prompt]
    tokens = ids_of(tokenizer, data.draw(st.lists(words, max_size=6)))
    text = behind(tokenizer, prompt, tokens, **({"special": True} if special else {}))
    assert plain(tokenizer, prompt, special) + text == plain(tokenizer, prompt + tokens, special)


@pytest.mark.parametrize("before", [["▁the"], ["▁the", "日"], ["👍", "▁the", "👍"], ["<s>"]])
@pytest.mark.parametrize("character", CHARACTERS[:3])
@pytest.mark.parametrize("name", ["llama", "gemma", "bytes"])
def test_a_character_that_the_prompt_begins_comes_whole(name: str, character: str, before: list[str]) -> None:
    """Nobody has it yet; special tokens within it change nothing. What stands before does not come again."""
    tokenizer = ALL[name]
    known, spelled = ids_of(tokenizer, before), ids_of(tokenizer, [character])
    special, rest = tokenizer.token_to_id("<end>"), ids_of(tokenizer, ["s", "👍", "s"])
    for cut in range(1, len(spelled)):
        prompt = [*known, *spelled[:cut], special]
        assert behind(tokenizer, prompt, [*spelled[cut:], *rest]) == f"{character}s👍s"
        space = ids_of(tokenizer, ["Ġcat" if name == "bytes" else "▁cat"])
        assert behind(tokenizer, prompt, space) == " cat"


def test_a_prompt_of_byte_tokens_alone_leaves_its_characters_out() -> None:
    """They are not spelled once more with the byte tokens that follow, whole or not."""
    tokenizer = FALLBACK["llama"]
    prompt, next_bytes = ids_of(tokenizer, ["👍", "👍"]), ids_of(tokenizer, ["👍"])
    assert behind(tokenizer, prompt, next_bytes) == "👍"
    assert behind(tokenizer, prompt, next_bytes[:2]) == "\ufffd\ufffd"


def test_a_sign_for_broken_text_may_be_one_that_the_prompt_begins() -> None:
    """It looks like the bytes that the prompt has of it, and what follows comes."""
    tokenizer = FALLBACK["llama"]
    first, *rest = ids_of(tokenizer, ["\ufffd"])
    prompt = [*ids_of(tokenizer, ["▁the"]), first, rest[0]]
    assert behind(tokenizer, prompt, [rest[1], *ids_of(tokenizer, ["▁cat"])]) == " cat"


@pytest.mark.parametrize(("stop", "expected"), [(" cat", ""), ("the cat", " cats"), ("cat", " ")])
def test_stop_strings_are_looked_for_behind_the_prompt(stop: str, expected: str) -> None:
    """From the first space on, and not across the end of the prompt."""
    tokenizer = METASPACE["first"]
    tokens = ids_of(tokenizer, ["▁cat", "s"])
    assert behind(tokenizer, ids_of(tokenizer, ["▁the"]), tokens, stops=[stop]) == expected


@pytest.mark.parametrize("name", ["first", "llama", "wordpiece", "bytes"])
def test_the_spellings_of_tokens_are_their_text(name: str) -> None:
    """Log probabilities name tokens as they stand in the text behind a prompt."""
    tokenizer = ALL[name]
    used = TextTokenizer(tokenizer.to_str().encode())
    words = {"wordpiece": ["cat", "##s", "!"], "bytes": ["Ġcat", "s", "é"]}.get(
        name, ["▁cat", "s", "!", "▁the"]
    )
    tokens = ids_of(tokenizer, words)
    spelled = b"".join(map(used.spelling, tokens)).decode()
    assert spelled == behind(tokenizer, ids_of(tokenizer, ["the"]), tokens)


def test_a_prompt_costs_the_same_however_long_it_is() -> None:
    """Of a long prompt a few tokens are looked at."""

    class Counting(TextTokenizer):
        looked = 0

        def has_no_text(self, token: int, special_tokens: bool = False) -> bool:
            self.looked += 1
            return super().has_no_text(token, special_tokens)

    tokenizer = METASPACE["first"]
    used, (word,) = Counting(tokenizer.to_str().encode()), ids_of(tokenizer, ["▁the"])
    assert used.end_of([word] * 10_000) == (word,)
    assert used.looked <= 4
