"""Text made a few tokens at a time equals text made at once; stop strings cut it where they begin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.text.text_stream import Detokenizer, Piece, StopStrings, TextStream
from orchestrator.text.tokenizer import TextTokenizer

SPECIAL = 0


def byte_level() -> TextTokenizer:
    """Byte-level vocabulary: one special token, then each byte, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": SPECIAL} | {symbol: id for id, symbol in enumerate(alphabet, 1)}
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("ð", "Ł")]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return TextTokenizer(tokenizer.to_str().encode())


def metaspace() -> TextTokenizer:
    """A sentencepiece-like vocabulary: words with their leading space, and byte fallback."""
    words = ["<s>", "▁the", "▁a", "▁", "cat", "▁cat", "s", "▁sat", "!", "x", "▁▁"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return TextTokenizer(tokenizer.to_str().encode())


def plain_metaspace() -> TextTokenizer:
    """The same words with the Metaspace decoder."""
    words = ["<s>", "▁the", "▁a", "▁", "cat", "▁cat", "s", "▁sat", "!", "x", "▁▁"]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return TextTokenizer(tokenizer.to_str().encode())


BYTE_LEVEL, METASPACE, PLAIN = byte_level(), metaspace(), plain_metaspace()


def stream(tokenizer: TextTokenizer, **options: object) -> TextStream:
    """The text stream of a tokenizer."""
    return TextStream(
        tokenizer.decode,
        tokenizer.byte_tokens,
        has_no_text=tokenizer.has_no_text,
        **options,  # type: ignore[arg-type]
    )


def pieces_of(text_stream: TextStream, tokens: list[int], sizes: list[int]) -> list[Piece]:
    """Push tokens in groups of the given sizes, then one by one, and flush."""
    pieces: list[Piece] = []
    position = 0
    for size in [*sizes, *[1] * len(tokens)]:
        if position >= len(tokens) or (pieces and pieces[-1].stop):
            break
        pieces += text_stream.push(tokens[position : position + size])
        position += size
    return pieces if pieces and pieces[-1].stop else pieces + text_stream.flush()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@pytest.mark.parametrize(
    "text", ["hello 👩‍👩‍👧‍👦 world", "日本語のテキスト", "e\u0301a\u0308o\u0302 ñ", "\ufffd a\ufffd"]
)
def test_characters_are_never_split(tokenizer: TextTokenizer, text: str) -> None:
    """Emoji, CJK and combining marks of several byte tokens come whole, one token at a time."""
    if tokenizer is BYTE_LEVEL:
        tokens = list(tokenizer.encode(text))
    else:
        tokens = [token for byte in text.encode() for token in [11 + byte]]
    pieces = pieces_of(stream(tokenizer), tokens, [])
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)
    assert sum(piece.tokens for piece in pieces) == len(tokens)
    assert all("\ufffd" not in piece.text or "\ufffd" in text for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PLAIN])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_of_all_at_once(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """Whatever the tokens and however they are grouped, the pieces join to the text of all tokens."""
    size = 263 if tokenizer is BYTE_LEVEL else 13  # a few ids that no token has among them
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=10))
    pieces = pieces_of(stream(tokenizer), tokens, sizes)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)
    assert sum(piece.tokens for piece in pieces) == len(tokens)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.one_of(st.integers(1, 10), st.integers(11, 266)), max_size=30),
    sizes=st.lists(st.integers(1, 6), max_size=10),
)
def test_byte_fallback_gives_the_text_of_all_at_once(tokens: list[int], sizes: list[int]) -> None:
    """Byte tokens decode as runs: their text waits for the end of the run."""
    pieces = pieces_of(stream(METASPACE), tokens, sizes)
    assert "".join(piece.text for piece in pieces) == METASPACE.decode(tokens)


def test_leading_space_is_kept_between_pieces() -> None:
    """A word's leading space is dropped at the very beginning only, special tokens or not."""
    for tokenizer in (METASPACE, PLAIN):
        tokens = [1, 5, SPECIAL, SPECIAL, 7, SPECIAL, 1]
        pieces = pieces_of(stream(tokenizer), tokens, [])
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens) == "the cat sat the"


def test_unfinished_character_is_flushed_at_the_end() -> None:
    """Bytes that never become a character end as U+FFFD."""
    tokens = list(BYTE_LEVEL.encode("a👍"))[:-1]
    text_stream = stream(BYTE_LEVEL)
    assert [piece.text for piece in text_stream.push(tokens)] == ["a"]
    assert [piece.text for piece in text_stream.flush()] == ["\ufffd"]


def test_text_is_held_only_as_long_as_it_may_change() -> None:
    """Broken bytes that no later token can complete are given out."""
    stray = BYTE_LEVEL.encode("é")[1]
    detokenizer = Detokenizer(BYTE_LEVEL.decode)
    detokenizer.push([stray] * 20)
    assert detokenizer.held == 1


UNFINISHED = BYTE_LEVEL.encode("é")[0]
BYTE = 11 + 0xF0


@pytest.mark.parametrize("at_once", [1, 2001])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (BYTE_LEVEL, [UNFINISHED, *[SPECIAL] * 2000]),
        (BYTE_LEVEL, [UNFINISHED, *[9999] * 2000]),
        (BYTE_LEVEL, [SPECIAL] * 2001),
        (METASPACE, [BYTE] * 2001),
    ],
    ids=["specials", "unknown", "specials alone", "bytes"],
)
def test_no_tokens_make_decoding_expensive(
    tokenizer: TextTokenizer, tokens: list[int], resumed: bool, at_once: int
) -> None:
    """Whatever may be held back, and however it comes: each token is decoded a few times."""
    decoded = 0

    def decode(window: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(window)
        return tokenizer.decode(window)

    before = tokens if resumed else []
    text_stream = TextStream(decode, tokenizer.byte_tokens, (), 0, before, tokenizer.has_no_text)
    given = [] if resumed else pieces_of(text_stream, tokens, [at_once])
    assert decoded < 4 * len(tokens)
    if not resumed:
        assert sum(piece.tokens for piece in given) == len(tokens)
        assert "".join(piece.text for piece in given) == tokenizer.decode(tokens)


def test_tokens_without_text_are_counted_where_they_came() -> None:
    """Behind a character that is not finished they wait with it; otherwise they go out at once."""
    first, second = BYTE_LEVEL.encode("é")
    text_stream = stream(BYTE_LEVEL)
    assert text_stream.push([SPECIAL, 9999]) == [Piece(2, "")]
    assert text_stream.push([SPECIAL, first, SPECIAL]) == [Piece(1, "")]
    assert text_stream.push([SPECIAL]) == []
    assert text_stream.push([second, SPECIAL]) == [Piece(5, "é")]


def test_without_a_tokenizer_tokens_pass() -> None:
    """Token ids need no text."""
    text_stream = TextStream(None)
    assert text_stream.push([1, 2, 3]) == [Piece(3, "")]
    assert text_stream.flush() == []


@pytest.mark.parametrize("sizes", [[], [3], [100]])
@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four", "ot"], "one two three", ""),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xyz", ["yz", "y"], "x", "y"),
        ("stop", ["stop"], "", "stop"),
        ("ends in sto", ["stop"], "ends in sto", ""),
        ("日本語", ["本"], "日", "本"),
        ("hello", ["ell"], "h", "ell"),
    ],
)
def test_stop_strings_cut_the_text(
    sizes: list[int], text: str, stops: list[str], expected: str, stop: str
) -> None:
    """The text ends before the first match, wherever tokens end; text that only begins like one comes out."""
    tokens = list(BYTE_LEVEL.encode(text))
    pieces = pieces_of(stream(BYTE_LEVEL, stops=stops), tokens, sizes)
    assert "".join(piece.text for piece in pieces) == expected
    assert (pieces[-1].stop if pieces else "") == stop


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=8),
)
def test_stop_strings_do_not_depend_on_grouping(text: str, stops: list[str], sizes: list[int]) -> None:
    """However tokens are grouped into verdicts, the text ends at the same place."""
    tokens = list(BYTE_LEVEL.encode(text))
    grouped = pieces_of(stream(BYTE_LEVEL, stops=stops), tokens, sizes)
    single = pieces_of(stream(BYTE_LEVEL, stops=stops), tokens, [])
    joined = "".join(piece.text for piece in grouped)
    assert joined == "".join(piece.text for piece in single)
    first_end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if first_end is None:
        assert joined == text
    else:
        assert any(text[:first_end] == joined + stop for stop in stops)


def test_pieces_are_whole_tokens() -> None:
    """A token whose end may begin a stop string is held back whole; a cut one counts if it begins before."""
    stops = StopStrings(["!!"])
    assert stops.push(Piece(1, "ab!")) == Piece(0, "")
    assert stops.push(Piece(1, "c")) == Piece(2, "ab!c")
    assert stops.push(Piece(1, "d!")) == Piece(0, "")
    assert stops.push(Piece(1, "!")) == Piece(1, "d", "!!")


def test_a_stop_string_that_stays_brings_its_tokens() -> None:
    """In whole tokens: those that begin within it; one that goes on behind it is cut there."""
    stops = StopStrings(["!!"], include=True)
    assert stops.push(Piece(1, "ab!")) == Piece(0, "")
    assert stops.push(Piece(1, "!c")) == Piece(2, "ab!!", "!!")


def test_consumed_tokens_end_with_the_stop_string() -> None:
    """Tokens after the one that completes the stop string are not part of the continuation."""
    text_stream = stream(BYTE_LEVEL, stops=["b"])
    text_stream.push(BYTE_LEVEL.encode("abcd"))
    assert text_stream.consumed == 2


def test_min_tokens_holds_for_stop_strings_too() -> None:
    """Text of the first min_tokens tokens is not searched."""
    text_stream = stream(BYTE_LEVEL, stops=["a"], min_tokens=3)
    pieces = pieces_of(text_stream, list(BYTE_LEVEL.encode("aaaba")), [])
    assert "".join(piece.text for piece in pieces) == "aaab"
    assert pieces[-1].stop == "a"


def test_resumed_tokens_are_not_given_out_again() -> None:
    """After a resume only new text comes, the space before it included, and a cut character comes whole."""
    words = stream(METASPACE, resumed=[1, 5])
    assert words.push([7, 8]) == [Piece(2, " sat!")]
    thumb = list(BYTE_LEVEL.encode("a👍"))
    cut = stream(BYTE_LEVEL, resumed=thumb[:-1])
    assert cut.push(thumb[-1:]) == [Piece(1, "👍")]


@pytest.mark.parametrize("broken", ["👍", "ü"])
def test_a_character_that_never_becomes_whole_comes_once(broken: str) -> None:
    """Its U+FFFD is given out when the next token shows that; a stream cut there goes on behind it."""
    tokens = [*BYTE_LEVEL.encode(broken)[:-1], *BYTE_LEVEL.encode("👍👍")[:-1]]
    whole = pieces_of(stream(BYTE_LEVEL), tokens, [])
    assert "".join(piece.text for piece in whole) == BYTE_LEVEL.decode(tokens)
    for cut in range(1, len(whole) + 1):
        given = tokens[: sum(piece.tokens for piece in whole[:cut])]
        rest = pieces_of(stream(BYTE_LEVEL, resumed=given), tokens[len(given) :], [])
        assert "".join(piece.text for piece in [*whole[:cut], *rest]) == BYTE_LEVEL.decode(tokens)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 266), min_size=1, max_size=12), share=st.floats(0, 1))
def test_a_stream_goes_on_behind_any_piece(tokenizer: TextTokenizer, tokens: list[int], share: float) -> None:
    """Behind the last one too, which brought bytes that nothing followed."""
    whole = pieces_of(stream(tokenizer), tokens, [])
    before = whole[: round(share * len(whole))]
    given = tokens[: sum(piece.tokens for piece in before)]
    rest = pieces_of(stream(tokenizer, resumed=given), tokens[len(given) :], [])
    assert "".join(piece.text for piece in [*before, *rest]) == tokenizer.decode(tokens)


def resumed_everywhere(tokens: list[int], **options: object) -> list[tuple[str, str, int]]:
    """What a caller has in the end, the stop string and the tokens, of streams cut behind each piece."""
    tokenizer, found = BYTE_LEVEL, []
    whole = pieces_of(stream(tokenizer, **options), tokens, [])
    for cut in range(len(whole) + 1):
        text = "".join(piece.text for piece in whole[:cut])
        given = tokens[: sum(piece.tokens for piece in whole[:cut])]
        rest = stream(tokenizer, resumed=given, **options)
        stop, pieces = rest.stop, [] if rest.stop else pieces_of(rest, tokens[len(given) :], [])
        text += "".join(piece.text for piece in pieces)
        found.append((text, stop or (pieces[-1].stop if pieces else ""), len(given) + rest.consumed))
    return found


HE, HELL = BYTE_LEVEL.encode("he")[0], BYTE_LEVEL.encode("hell")[0]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["l", "ell", "llo", "lo", "hello", "he"])
def test_a_stop_string_ends_a_resumed_text(stop: str, include: bool) -> None:
    """Wherever the stream was cut: also behind its last piece, whose token may have begun before the stop
    string and ended in it, so that the caller has the token and a part of its text."""
    tokens = [*BYTE_LEVEL.encode("x"), HELL, *BYTE_LEVEL.encode("oy")]
    expected = "xhelloy"[: "xhelloy".find(stop) + len(stop) * include]
    consumed = 2 if stop in "hell" else 3
    assert set(resumed_everywhere(tokens, stops=[stop], include_stop=include)) == {(expected, stop, consumed)}


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([HE, HELL, *BYTE_LEVEL.encode("hélo")]), max_size=12),
    stops=st.lists(st.text("helo", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
def test_a_resumed_text_stops_where_the_whole_one_does(
    tokens: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    """Whatever the stop strings, and with tokens that are not searched."""
    options = {"stops": stops, "min_tokens": min_tokens, "include_stop": include}
    assert len(set(resumed_everywhere(tokens, **options))) == 1


def test_long_resumed_texts_are_searched_for_stop_strings() -> None:
    """Also where tokens at the beginning are not searched."""
    tokens = [*BYTE_LEVEL.encode("ab" * 3000), *BYTE_LEVEL.encode("c")]
    for min_tokens in (0, 2000):
        rest = stream(BYTE_LEVEL, stops=["cd"], min_tokens=min_tokens, resumed=tokens)
        assert (rest.stop, rest.push(BYTE_LEVEL.encode("x"))) == ("", [Piece(1, "x")])
        assert stream(BYTE_LEVEL, stops=["bc"], min_tokens=min_tokens, resumed=tokens).stop == "bc"
