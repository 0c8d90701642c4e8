"""Tokenizers as Llama 2 and Mistral, Llama 3, and Qwen have them, trained here on a few sentences: against the tokenizers
library's own encoding and decoding."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from small_tokenizers import byte_level, metaspace, model_folder, sentencepiece
from tokenizers import AddedToken, Tokenizer as Backend, decoders, normalizers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.features.pooling_inputs import encode_pair
from stage03_engine.frontend.tokenizer import Tokenizer, get_tokenizer, init_tokenizer_from_configs
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

BACKENDS: dict[str, Backend] = {
    "llama2": sentencepiece(),
    "gemma": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "llama3": byte_level(),
    "qwen": byte_level(bos=False, normalizer=normalizers.NFC()),
}
KINDS = {name: Tokenizer(backend, None) for name, backend in BACKENDS.items()}
SP = ["llama2", "gemma", "metaspace"]

texts = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(alphabet="to be é😀\n\t ▁,<s>", max_size=30),
    st.lists(st.sampled_from(["to", " ", "  be", "<s>", "</s>", "<tool>", "é", "😀", "\n", "<0x41>"])).map("".join),
)


def stream(kind: str, ids: list[int], prompt: list[int] | None = None, **params: Any) -> str:
    """The deltas of one token at a time, joined."""
    detokenizer = IncrementalDetokenizer(KINDS[kind], SamplingParams(**params), prompt)
    deltas = []
    for token_id in ids:
        detokenizer.update([token_id])
        deltas.append(detokenizer.next_text(delta=True))
    detokenizer.finish()
    return "".join([*deltas, detokenizer.next_text(delta=True)])


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, skip=st.booleans())
def test_encoded_text_streams_as_the_library_decodes_it(kind: str, text: str, skip: bool) -> None:
    ids = KINDS[kind].encode(text)
    assert ids == BACKENDS[kind].encode(text).ids
    expected = BACKENDS[kind].decode(ids, skip_special_tokens=skip)
    assert KINDS[kind].decode(ids, skip_special_tokens=skip) == expected
    assert stream(kind, ids, skip_special_tokens=skip) == expected


def library_row(raw: bytes) -> str:
    """What a row of byte tokens streams as: whole characters, then U+FFFD for each byte from the first wrong one on."""
    for good in range(len(raw), -1, -1):
        try:
            text = raw[:good].decode()
        except UnicodeDecodeError:
            continue
        return text + "\ufffd" * (len(raw) - good)
    raise AssertionError


@pytest.mark.parametrize("kind", SP)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_stream_as_the_library_decodes_them(kind: str, data: st.DataObject, skip: bool) -> None:
    """Random tokens hold rows of bytes that are no text. In one case the library differs, on purpose: a row that begins
    with whole characters and then goes wrong. There the oracle is the rule itself, applied to each row of bytes."""
    backend, tokenizer = BACKENDS[kind], KINDS[kind]
    size = backend.get_vocab_size()
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 3), st.integers(3, min(size, 258))), max_size=20))
    ids += [backend.token_to_id("to") or 5]  # an unfinished character at the end would be missing
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    shown = [backend.id_to_token(i) or "" for i in ids if not (skip and i in special)]
    joined = "".join(t if re.fullmatch(r"<0x[0-9A-F]{2}>", t) else "|" for t in shown if t)
    rows = [bytes.fromhex("".join(re.findall(r"<0x(..)>", row))) for row in joined.split("|")]
    if kind != "metaspace" and any(library_row(row).strip("\ufffd") and "\ufffd" in library_row(row) for row in rows):
        pieces = [t if re.fullmatch(r"<0x[0-9A-F]{2}>", t) else t.replace("▁", " ") for t in shown]
        text = re.sub(
            r"(<0x[0-9A-F]{2}>)+", lambda m: library_row(bytes.fromhex(re.sub("<0x|>", "", m[0]))), "".join(pieces)
        )
        expected = text.removeprefix(" ") if kind == "llama2" else text
    assert stream(kind, ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(
    first=st.sampled_from(["to be", "", "<s>", "x", "é"]), second=st.sampled_from(["to be", "  so", "é!", "<tool> x"])
)
def test_the_output_continues_the_prompt(kind: str, first: str, second: str) -> None:
    """Prompt and output together are the decoded whole: a space between them belongs to the output, and is stripped only
    when no text came before."""
    backend = BACKENDS[kind]
    prompt, output = backend.encode(first).ids, backend.encode(second, add_special_tokens=False).ids
    whole = backend.decode(prompt + output)
    assert backend.decode(prompt) + stream(kind, output, prompt) == whole


def test_what_the_tokenizer_does_not_know_is_no_text_before_the_output() -> None:
    """A model may have more ids than its tokenizer."""
    ids = KINDS["llama2"].encode("to be", add_special_tokens=False)
    assert stream("llama2", ids, [1, 100_000]) == "to be" and stream("llama2", ids, [1, *ids]) == " to be"


def test_every_space_of_a_first_metaspace_token_goes() -> None:
    ids = [KINDS["metaspace"].encode("▁▁x▁")[-1]] * 2
    assert stream("metaspace", ids) == BACKENDS["metaspace"].decode(ids) == "x  x "


def test_a_line_break_is_shown_at_once_though_it_is_a_byte_token() -> None:
    detokenizer = IncrementalDetokenizer(KINDS["llama2"], SamplingParams(stop=["\n"]))
    ids = KINDS["llama2"].encode("to\nbe", add_special_tokens=False)
    line_break = next(i for i, token_id in enumerate(ids) if detokenizer.update([token_id]) == "\n")
    assert BACKENDS["llama2"].id_to_token(ids[line_break]) == "<0x0A>" and line_break < len(ids) - 1
    assert detokenizer.text == "to"


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_bytes_of_tokens_and_the_longest(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(len(tokenizer.token_bytes(i)) <= tokenizer.max_token_bytes for i in ids)
    assert len(text) <= len(ids) * tokenizer.max_token_bytes


def test_the_longest_token_is_right_or_unbounded() -> None:
    for kind in ("llama2", "gemma", "llama3"):
        longest = max(len(KINDS[kind].token_bytes(i)) for i in range(BACKENDS[kind].get_vocab_size()))
        assert KINDS[kind].max_token_bytes == longest < 20
    assert KINDS["qwen"].max_token_bytes < 100, "NFC joins at most four characters"
    assert KINDS["metaspace"].max_token_bytes == sys.maxsize, "spaces vanish"
    stripping = sentencepiece()
    stripping.normalizer = normalizers.Strip()
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<end>", rstrip=True)])
    assert Tokenizer(stripping, None).max_token_bytes == Tokenizer(swallowing, None).max_token_bytes == sys.maxsize
    assert len(swallowing.encode("<end>" + 500 * " ").ids) < 500 / 20


def test_token_bytes() -> None:
    tokenizer, backend = KINDS["llama2"], BACKENDS["llama2"]
    assert tokenizer.token_bytes(backend.token_to_id("▁to")) == b" to"
    assert tokenizer.token_bytes(backend.token_to_id("<0xE9>")) == b"\xe9"
    assert tokenizer.token_bytes(backend.token_to_id("<s>")) == b"<s>"
    assert tokenizer.token_bytes(backend.token_to_id("<tool>")) == b"<tool>"
    assert tokenizer.token_bytes(100_000) == b""


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_the_beginning_of_text_comes_from_the_tokenizers_file(kind: str) -> None:
    plain = KINDS[kind].encode("to be", add_special_tokens=False)
    assert KINDS[kind].encode("to be") == [1, *plain]


# Folders


def load(folder: Path, backend: Backend, settings: dict[str, Any], **config: Any) -> Tokenizer:
    model_folder(folder, backend, settings, **config)
    return init_tokenizer_from_configs(EngineArgs.from_kwargs(model=str(folder), load_format="dummy"))


def test_special_tokens_of_a_folder(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece(), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert (tokenizer.eos_token_id, tokenizer.more_eos_token_ids) == (2, ())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    tokenizer = load(tmp_path, byte_level(bos=False), {"bos_token": None, "eos_token": "</s>"}, eos_token_id=[9, 2, 4])
    assert (tokenizer.eos_token_id, tokenizer.more_eos_token_ids) == (2, (9, 4)), "the tokenizer's own first"
    assert tokenizer.bos_token == ""
    tokenizer = load(tmp_path, byte_level(), {}, eos_token_id=[9, 2])
    assert (tokenizer.eos_token_id, tokenizer.more_eos_token_ids) == (9, (2,))


def test_a_token_is_looked_up_once_however_often_a_text_repeats_it() -> None:
    """A million ids would otherwise take seconds."""
    tokenizer, asked = Tokenizer(BACKENDS["llama3"], None), []
    real = tokenizer.token_bytes
    tokenizer.token_bytes = lambda token_id: (asked.append(token_id), real(token_id))[1]  # type: ignore[method-assign]
    first, second = tokenizer.encode("to be", add_special_tokens=False)[:2]
    asked.clear()
    assert tokenizer.decode([first, second] * 1000) == (real(first) + real(second)).decode() * 1000
    assert sorted(asked) == sorted({first, second})


@pytest.mark.parametrize("text", ["[]", "5", "{", "[" * 100_000, "\udcff"])
def test_unusable_settings_of_a_folder_are_refused(text: str, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="tokenizer_config.json"):
        get_tokenizer(str(tmp_path))


def test_chat_templates_of_a_folder(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for given_template, expected in (("X", "X"), (listed, "D"), (listed[:1], None), (None, None), (5, None)):
        assert load(tmp_path, sentencepiece(), {"chat_template": given_template}).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}")
    assert load(tmp_path, sentencepiece(), {"chat_template": "X"}).chat_template == "{{ 'é' }}"


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "decoder", decoders.CTC()),
        lambda b: setattr(b, "decoder", decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
        lambda b: setattr(b, "decoder", decoders.Strip(" ", 1, 1)),
    ],
)
def test_other_kinds_are_refused(change: Callable[[Backend], None], tmp_path: Path) -> None:
    backend = sentencepiece()
    change(backend)
    with pytest.raises(ConfigError, match=f"{tmp_path}.*not supported"):
        load(tmp_path, backend, {})


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_a_llama_with_its_tokenizer_from_text_to_text(kind: str, tmp_path: Path) -> None:
    backend = BACKENDS[kind]
    model_folder(tmp_path, backend, {}, vocab_size=backend.get_vocab_size())
    with LLM(str(tmp_path), load_format="dummy", num_gpu_blocks_override=20, seed=4) as llm:
        params = SamplingParams(temperature=2.0, seed=3, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(["to be", "é 😀"], params)
    for output in outputs:
        assert output.prompt_token_ids == backend.encode(output.prompt).ids and output.prompt_token_ids[0] == 1
        deltas = stream(kind, output.outputs[0].token_ids, output.prompt_token_ids)
        assert output.outputs[0].text == deltas and len(deltas) > 20


@pytest.mark.parametrize("pair", [False, True])
def test_a_long_text_leaves_other_threads_their_time(pair: bool) -> None:
    """The server tokenizes long texts in a thread; its event loop must go on meanwhile."""
    done, ticks, text = threading.Event(), 0, "to be or not " * 50_000

    def encode() -> None:
        if pair:
            encode_pair(KINDS["llama3"], text, "that is the question", 100)
        else:
            KINDS["llama3"].encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 20
