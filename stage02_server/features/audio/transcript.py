"""From Whisper's tokens to timed segments, words, and subtitles (vllm/entrypoints/speech_to_text/base/serving.py,
_get_verbose_segments; openai/whisper, whisper/timing.py for the words)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from stage02_server.features.audio.protocol import TranscriptionSegment, TranscriptionWord
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import payload
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.audio import SpeechDetails

SECONDS_PER_TIMESTAMP = 0.02
WITHOUT_SPACES = {"ja", "lo", "my", "th", "yue", "zh"}  # languages that write words without spaces between them
BELONGS_TO_NEXT = "\"'“¿([{-"
BELONGS_TO_LAST = "\"'.。,，!！?？:：”)]}、"
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """Where a piece of sound lies in the whole, in seconds."""

    start: float
    length: float

    def time(self, seconds: float) -> float:
        """A time in the piece as one in the whole. Whisper hears silence after the end; what it places there moves to the end."""
        return round(self.start + min(seconds, self.length), 3)


@dataclass
class _Word:
    text: str
    places: list[int]  # of its tokens, among those of the segment


class Transcript:
    """The segments and words of one text, piece by piece. `timestamps_from` is the id of the token for 0.00 seconds."""

    def __init__(self, tokenizer: Tokenizer, timestamps_from: int, temperature: float, language: str) -> None:
        self._tokenizer, self._timestamps_from, self._temperature = tokenizer, timestamps_from, temperature
        self._spaces = language not in WITHOUT_SPACES
        self.segments: list[TranscriptionSegment] = []
        self.words: list[TranscriptionWord] = []

    @property
    def text(self) -> str:
        """Everything that was said."""
        return "".join(segment.text for segment in self.segments).strip()

    def add(self, output: RequestOutput, piece: Piece) -> float:
        """The next piece. Returns how many seconds of it were heard.

        Two times in a row are the end of a segment and the beginning of the next. What comes after the last such pair, and
        is not ended by a time itself, was cut off by the end of the piece: it is dropped, and heard again as the beginning
        of another. Without any pair the piece is one segment.
        """
        start, places, ended_by_time = 0.0, list[int](), False
        last_time: float | None = None
        pair: float | None = None  # the time of the last one
        for place, token in enumerate(output.outputs[0].token_ids):
            if token >= self._timestamps_from:
                time = (token - self._timestamps_from) * SECONDS_PER_TIMESTAMP
                ended_by_time = bool(places)
                if places:
                    self._close(output, places, piece, start, time)
                elif last_time is not None:
                    pair = last_time
                start, last_time, places = time, time, []
            elif not self._tokenizer.is_special(token):
                places.append(place)
                ended_by_time = False
        if pair is not None and not ended_by_time:
            return min(pair, piece.length)
        if places:
            self._close(output, places, piece, start, piece.length)
        return piece.length

    def _close(self, output: RequestOutput, places: list[int], piece: Piece, start: float, end: float) -> None:
        answer, speech = output.outputs[0], (output.result or {}).get("speech")
        assert answer.logprobs is not None and speech is not None, "requests with timestamps ask for both"
        speech = payload(speech, SpeechDetails)
        tokens = [answer.token_ids[place] for place in places]
        text = self._tokenizer.decode(tokens)
        self.segments.append(
            TranscriptionSegment(
                id=len(self.segments),
                seek=round(piece.start * 100),
                start=piece.time(start),
                end=piece.time(end),
                text=text,
                tokens=tokens,
                temperature=self._temperature,
                avg_logprob=sum(answer.logprobs[place].logprobs[0] for place in places) / len(places),
                compression_ratio=len(text.encode()) / len(zlib.compress(text.encode())),
                no_speech_prob=speech.no_speech_prob,
            )
        )
        if speech.token_ends is not None:
            begins = [0.0, *speech.token_ends]  # a token begins where the one before ends
            for word in split_words(self._tokenizer, tokens, self._spaces):
                first, last = places[word.places[0]], places[word.places[-1]]
                begin, end = piece.time(begins[first]), piece.time(begins[last + 1])
                self.words.append(TranscriptionWord(word=word.text, start=begin, end=end))


def split_words(tokenizer: Tokenizer, tokens: list[int], spaces: bool) -> list[_Word]:
    """Whole characters, joined to words where a language writes spaces; punctuation goes with the word that it touches."""
    words: list[_Word] = []
    for part in _characters(tokenizer, tokens):
        alone = not words or part.text.startswith(" ") or part.text.strip() in _PUNCTUATION
        if alone or not spaces:
            words.append(part)
        else:
            words[-1] = _Word(words[-1].text + part.text, words[-1].places + part.places)
    words = _join_backwards(words)
    for word in words:
        word.text = word.text.strip()
    return [word for word in words if word.text]


def _characters(tokenizer: Tokenizer, tokens: list[int]) -> list[_Word]:
    """The shortest runs of tokens that are whole characters; what is broken in the whole text too is a run of its own."""
    whole, parts, run = tokenizer.decode(tokens), list[_Word](), list[int]()
    offset = 0  # of the run in the whole text
    for place in range(len(tokens)):
        run.append(place)
        text = tokenizer.decode([tokens[i] for i in run])
        broken = text.find(_BROKEN)
        if broken == -1 or whole[offset + broken : offset + broken + 1] in ("", _BROKEN):
            parts.append(_Word(text, run))
            offset, run = offset + len(text), []
    return parts


def _join_backwards(words: list[_Word]) -> list[_Word]:
    """An opening quote or bracket joins the word after it; then a full stop or similar mark joins the word before it."""
    opened: list[_Word] = []
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in BELONGS_TO_NEXT:
            opened[-1] = _Word(word.text + opened[-1].text, word.places + opened[-1].places)
        else:
            opened.append(word)
    joined: list[_Word] = []
    for word in reversed(opened):
        if joined and not joined[-1].text.endswith(" ") and word.text in BELONGS_TO_LAST:
            joined[-1] = _Word(joined[-1].text + word.text, joined[-1].places + word.places)
        else:
            joined.append(word)
    return joined


def to_srt(segments: list[TranscriptionSegment]) -> str:
    """SubRip: numbered, with a comma before the milliseconds."""
    return "".join(
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, start=1)
    )


def to_vtt(segments: list[TranscriptionSegment]) -> str:
    """WebVTT: a header, and a point before the milliseconds."""
    cues = (f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: TranscriptionSegment) -> str:
    """The text of a subtitle: neither an empty line, which would end it, nor an arrow, which would begin another."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
