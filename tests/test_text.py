"""Text as it comes, against decoding everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.engine.text import TextStream
from kvpager.tests.model_files import require_smollm2

WORDS = (
    "the",
    " cat",
    " sat",
    "né",
    "日本",
    "語",
    "🙂",
    "👩‍👩‍👧",
    " \n",
    "ß",
    "مرحبا",
    "e\u0301",
    "\ufffd",
    "  ",
)
SPECIAL = "<|end|>"


@cache
def byte_level() -> Any:
    """Byte-level BPE: every token is a byte or a few, so most characters are several tokens."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: at for at, symbol in enumerate(symbols)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "c"), ("Ġc", "a"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "Ļ")]
    vocabulary |= {left + right: len(vocabulary) + at for at, (left, right) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return _fast(tokenizer)


@cache
def spaces_as_marks() -> Any:
    """The way of Llama 2: a mark for a space, dropped at the very beginning, and bytes as a fallback."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "the", "s", "at", "▁s", "n", "é", "日", "🙂", "e", "a", "t", "h"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    merges = [("a", "t"), ("▁", "s")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return _fast(tokenizer)


def _fast(tokenizer: tokenizers.Tokenizer) -> Any:
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def whole(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def read(stream: TextStream, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Feed the tokens up to each cut, then all; the pieces that came."""
    array = np.array(tokens, dtype=np.int32)
    pieces = []
    for cut in cuts:
        stream.feed(array[:cut])
        pieces.append(stream.take())
        if stream.stopped:
            return pieces
    stream.feed(array, last=True)
    return [*pieces, stream.take()]


def cut_before(text: str, stops: Sequence[str]) -> str:
    """The text as far as no stop string has been completed in it.

    Text comes in pieces, so the string that is completed first ends it, also where a longer one began
    before.
    """
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)[1]] if ends else text


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_tokens_read_one_by_one_are_the_whole_text(data: st.DataObject) -> None:
    tokenizer = byte_level()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    stream = TextStream(tokenizer)
    pieces = read(stream, tokens, range(1, len(tokens) + 1))
    assert "".join(pieces) == stream.text == whole(tokenizer, tokens)
    assert not stream.stopped


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
@settings(max_examples=100, deadline=None)
def test_tokens_whose_text_depends_on_those_before_are_read_right(words: list[str]) -> None:
    tokenizer = spaces_as_marks()
    tokens = tokenizer.encode("".join(words).replace(" ", "▁"))
    pieces = read(TextStream(tokenizer), tokens, range(1, len(tokens) + 1))
    assert "".join(pieces) == whole(tokenizer, tokens)


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), data=st.data())
@settings(max_examples=150, deadline=None)
def test_text_in_any_portions_is_whole_and_never_shows_half_a_character(
    words: list[str], data: st.DataObject
) -> None:
    tokenizer = byte_level()
    text = "".join(words)
    tokens = tokenizer.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    pieces = read(TextStream(tokenizer), tokens, cuts)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), data=st.data())
@settings(max_examples=200, deadline=None)
def test_nothing_of_a_stop_string_is_ever_handed_out(words: list[str], data: st.DataObject) -> None:
    tokenizer = byte_level()
    text = "".join(words)
    tokens = tokenizer.encode(text)
    starts = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=3))
    stops = [text[start : start + data.draw(st.integers(1, 5))] for start in starts]
    stream = TextStream(tokenizer, stops)
    pieces = read(stream, tokens, range(1, len(tokens) + 1))
    assert stream.stopped
    assert "".join(pieces) == stream.text == cut_before(text, stops)


def test_what_may_begin_a_stop_string_is_held_back_and_handed_out_when_it_does_not() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, ("abcd", "xy"))
    taken = []
    tokens = tokenizer.encode("..abc.xz")
    for end in range(1, len(tokens) + 1):
        stream.feed(np.array(tokens[:end], dtype=np.int32))
        taken.append(stream.take())
    assert "".join(taken) == "..abc"
    stream.feed(np.array(tokens, dtype=np.int32), last=True)
    assert stream.take() == ".xz"
    assert not stream.stopped


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a🙂")[:-1]
    pieces = read(TextStream(tokenizer), tokens, range(1, len(tokens) + 1))
    assert "".join(pieces) == whole(tokenizer, tokens)
    assert pieces[-1]
    assert set(pieces[-1]) == {"\ufffd"}


def test_nothing_comes_after_a_stop_string() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, ("stop",))
    tokens = np.array(tokenizer.encode("go stop go on"), dtype=np.int32)
    stream.feed(tokens[:8])
    assert stream.stopped
    stream.feed(tokens)
    stream.feed(tokens, last=True)
    assert stream.take() == stream.text == "go "
    assert stream.take() == ""


def test_special_tokens_are_no_text() -> None:
    tokenizer = byte_level()
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    tokens = [special, *tokenizer.encode("né"), special, *tokenizer.encode("🙂"), special]
    assert "".join(read(TextStream(tokenizer), tokens, range(1, len(tokens) + 1))) == "né🙂"


def test_the_tokenizer_of_smollm2_token_by_token() -> None:
    path = require_smollm2()
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(path.parent, gguf_file=path.name)
    text = " ".join(WORDS) + "\n\tdef f(x):\n        return 'naïve' # 世界 🙂🙂"
    tokens = tokenizer.encode(text)
    assert "".join(read(TextStream(tokenizer), tokens, range(1, len(tokens) + 1))) == whole(tokenizer, tokens)
    random = np.random.default_rng(5).integers(0, len(tokenizer), 300).tolist()
    assert "".join(read(TextStream(tokenizer), random, range(1, 301))) == whole(tokenizer, random)
