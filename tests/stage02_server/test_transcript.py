"""Words against transformers', and what subtitles make of odd texts."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hypothesis import given, strategies as st
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from stage02_server.features.audio.protocol import TranscriptionSegment
from stage02_server.features.audio.transcript import Piece, split_words, to_srt, to_vtt
from stage03_engine.frontend.tokenizer import Tokenizer, get_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer("gpt2-tiny")


class AsTransformers:
    """Our tokenizer behind the two names that transformers' function needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, 10**9

    def decode(self, tokens: list[int], decode_with_timestamps: bool) -> str:
        return self._tokenizer.decode(tokens)


TEXTS = st.lists(
    st.sampled_from(
        [" Hello", "world", ",", ".", " (", ")", ' "', '"', " ", "  ", "é", "日本", "語", "。", " -", "!?", "🙂"]
    ),
    min_size=1,
    max_size=8,
).map("".join)


@given(TEXTS, st.booleans(), st.integers(0, 2))
def test_words_are_those_of_transformers(tokenizer: Tokenizer, text: str, spaces: bool, cut: int) -> None:
    """`cut` takes tokens from the end, and with them perhaps half of a character."""
    tokens = tokenizer.encode(text)[: -cut or None]
    words, _, places = _combine_tokens_into_words(
        AsTransformers(tokenizer), tokens, "english" if spaces else "japanese"
    )
    wanted = [(word.strip(), each) for word, each in zip(words, places) if word.strip()]
    assert [(word.text, word.places) for word in split_words(tokenizer, tokens, spaces)] == wanted


def segment(start: float, end: float, text: str) -> TranscriptionSegment:
    return TranscriptionSegment(
        id=0, seek=0, start=start, end=end, text=text, tokens=[], temperature=0, avg_logprob=0, compression_ratio=1,
        no_speech_prob=0,
    )  # fmt: skip


def test_subtitles() -> None:
    segments = [segment(0.0, 59.9996, " One\n\ntwo"), segment(3661.5, 3661.999, " 1 --> 2")]
    assert to_srt(segments) == (
        "1\n00:00:00,000 --> 00:01:00,000\nOne two\n\n2\n01:01:01,500 --> 01:01:01,999\n1 -> 2\n\n"
    )
    assert to_vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:01:00.000\nOne two\n\n01:01:01.500 --> 01:01:01.999\n1 -> 2\n\n"
    )
    assert to_srt([]) == "" and to_vtt([]) == "WEBVTT\n\n"


def test_what_is_heard_behind_the_end_of_a_piece_is_at_its_end() -> None:
    piece = Piece(start=29.5, length=10.0)
    assert [piece.time(t) for t in (0.0, 0.02, 10.0, 29.98)] == [29.5, 29.52, 39.5, 39.5]
