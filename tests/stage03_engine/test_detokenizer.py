"""Incremental detokenization: no half character leaves, no stop string slips through, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.models import BPE

import stage03_engine.bundled
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop
from stage03_engine.frontend.tokenizer import Tokenizer, init_tokenizer_from_configs
from stage03_engine.sampling_params import SamplingParams

BUNDLED = Path(stage03_engine.bundled.__file__).parent / "gpt2-tiny"
TOKENIZER = init_tokenizer_from_configs(EngineArgs.from_kwargs(model="gpt2-tiny"))
STAND_IN = init_tokenizer_from_configs(EngineArgs.from_kwargs(model="gpt2", load_format="dummy"))

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], **params) -> tuple[list[str], str | None]:
    """Feed one token at a time; returns (the deltas, the stop string that ended it)."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
    deltas, stop = [], None
    for token_id in ids:
        stop = detokenizer.update([token_id])
        deltas.append(detokenizer.next_text(delta=True))
        if stop is not None:
            return deltas, stop
    detokenizer.finish()
    deltas.append(detokenizer.next_text(delta=True))
    return deltas, None


@pytest.mark.parametrize("tokenizer", [TOKENIZER, STAND_IN], ids=["bundled", "stand-in"])
@given(text=texts)
def test_text_comes_back_whole_and_never_broken(tokenizer: Tokenizer, text: str) -> None:
    deltas, _ = stream(tokenizer, tokenizer.encode(text), skip_special_tokens=False)
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.text("aĠé●\u0100 \U0001f600", min_size=1, max_size=4), min_size=1, max_size=8, unique=True))
def test_a_vocabulary_may_spell_tokens_in_any_characters(tokens: list[str]) -> None:
    """Also outside the 256 of the byte alphabet: each token's bytes are those of the library's decoder."""
    backend = Backend(BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.decoder = ByteLevel()
    tokenizer = Tokenizer(backend, None)
    for number in range(len(tokens)):
        assert tokenizer.token_text(number) == backend.decode([number])
    assert tokenizer.max_token_bytes >= max(len(tokenizer.token_bytes(number)) for number in range(len(tokens)))


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_any_tokens_give_what_decoding_the_whole_gives(ids: list[int]) -> None:
    """Random tokens are full of invalid UTF-8. Only the beginning of a character at the very end may be missing (of half a surrogate
    these are two bytes that were never to become one)."""
    deltas, _ = stream(TOKENIZER, ids)
    raw = b"".join(TOKENIZER.token_bytes(i) for i in ids if not TOKENIZER.is_special(i))
    for dropped in range(4):
        kept = raw[: len(raw) - dropped]
        if kept.decode("utf-8", errors="replace") == "".join(deltas):
            assert set(raw[len(kept) :].decode("utf-8", errors="replace")) <= {"\ufffd"}
            return
    pytest.fail("the deltas are not the decoded tokens")


@given(st.lists(st.one_of(st.integers(0, 259), st.integers(0, 2047)), max_size=30))
def test_decode_stream_of_the_tokenizers_library_holds_back_what_ends_in_a_replacement_character(
    ids: list[int],
) -> None:
    """What vLLM decodes with is never ahead of ours, and equal to it after each token that completes a character. Behind bytes that
    are no UTF-8, or a token that begins another character, ours has shown text that the library still holds back."""
    own, library = TOKENIZER.stream([], skip_special_tokens=False), DecodeStream(skip_special_tokens=False)
    shown = theirs = ""
    for count, token_id in enumerate(ids, 1):
        shown += own.push(TOKENIZER.token(token_id), TOKENIZER.token_bytes(token_id))
        theirs += library.step(TOKENIZER.backend, token_id) or ""
        assert shown.startswith(theirs)
        raw = b"".join(TOKENIZER.token_bytes(i) for i in ids[:count])
        if not raw.decode("utf-8", errors="replace").endswith("\ufffd"):
            assert theirs == shown


def test_a_model_that_ends_in_invalid_bytes_is_heard_at_once() -> None:
    """With DecodeStream the two characters would be withheld for good."""
    invalid = [i for i in range(256) if TOKENIZER.token_bytes(i) == b"\xff"] * 2
    own, library = TOKENIZER.stream([]), DecodeStream()
    assert [own.push(TOKENIZER.token(i), TOKENIZER.token_bytes(i)) for i in invalid] == ["\ufffd", "\ufffd"]
    assert [library.step(TOKENIZER.backend, i) for i in invalid] == [None, None]


@given(
    text=st.text(alphabet="abcé\n", max_size=25),
    stops=st.lists(st.text(alphabet="abcé\n", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_searching_the_whole_text(text: str, stops: list[str], include: bool) -> None:
    """The oracle looks at the finished text. Bytes as tokens make every stop string cross token boundaries."""
    ids = STAND_IN.encode(text)
    deltas, stop = stream(STAND_IN, ids, stop=stops, include_stop_str_in_output=include)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert stop is None and "".join(deltas) == text
        return
    # Text arrives character by character, so the stop string that is complete first wins.
    end = min(ends)
    candidates = [s for s in stops if s in text and text.find(s) + len(s) == end]
    longest = max(candidates, key=len)
    assert stop == longest
    assert "".join(deltas) == (text[:end] if include else text[: end - len(longest)])


def test_text_is_held_back_only_while_it_could_become_a_stop_string() -> None:
    deltas, stop = stream(STAND_IN, STAND_IN.encode("abxab</s>tail"), stop=["</s>", "abc"])
    assert stop == "</s>"
    assert deltas[:5] == ["", "", "abx", "", ""]  # "ab" waits for a possible "c", then goes out at once
    assert "".join(deltas) == "abxab"


def test_the_earliest_stop_string_is_found_and_of_two_at_one_place_the_longest() -> None:
    for text, stops, start, expected in (
        ("xabc", ["a", "abc", "ab"], 0, (1, "abc")),
        ("xabc", ["abc", "ab", "a"], 0, (1, "abc")),
        ("xabc", ["bc", "xa"], 0, (0, "xa")),
        ("xaxa", ["xa"], 1, (2, "xa")),
        ("xabc", ["abd"], 0, None),
    ):
        assert find_stop(text, stops, start) == expected


def test_in_the_first_min_tokens_no_stop_string_counts_and_no_text_waits_for_one() -> None:
    for stop, min_tokens, sent, stopped_by in (
        ("a", 0, [""], "a"),
        ("a", 1, ["a", "b", ""], "a"),
        ("a", 2, ["a", "b", ""], "a"),
        ("a", 3, ["a", "b", "a", ""], None),
        ("bx", 0, ["a", "", "ba", ""], None),
        ("bx", 2, ["a", "b", "a", ""], None),
    ):
        found = stream(STAND_IN, STAND_IN.encode("aba"), stop=[stop], min_tokens=min_tokens)
        assert found == (sent, stopped_by), (stop, min_tokens)


def test_gpt2_files_give_the_same_tokens_with_and_without_tokenizer_json(tmp_path: Path) -> None:
    """Older folders have vocab.json and merges.txt only. The bundled tokenizer is taken apart to make such a folder."""
    import json

    whole = json.loads((BUNDLED / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "config.json").write_text((BUNDLED / "config.json").read_text())
    config = EngineArgs.from_kwargs(model="gpt2-tiny", tokenizer=str(tmp_path))
    old = init_tokenizer_from_configs(config)
    text = "To be, or not to be: that's naïve.\n\n  <|endoftext|>"
    assert old.encode(text) == TOKENIZER.encode(text)
    assert old.eos_token_id == TOKENIZER.eos_token_id == 0
    assert old.decode(old.encode(text)) == text.removesuffix("<|endoftext|>")


def test_the_stand_in_has_the_models_vocabulary() -> None:
    assert STAND_IN.vocab_size == 50257 and STAND_IN.eos_token_id == 50256
    assert STAND_IN.encode("!") == [0] and STAND_IN.token_text(40000) == " t40000"
