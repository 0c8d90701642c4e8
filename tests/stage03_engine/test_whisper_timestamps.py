"""The rules for timestamps and the alignment of words, against what transformers does with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import given, strategies as st
from small_whisper import whisper_folder
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.whisper.whisper_core import WhisperCore
from stage03_engine.core.features.whisper.whisper_timestamps import align, apply_timestamp_rules, median_filter
from stage03_engine.errors import InvalidRequestError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.audio import AudioInput
from stage03_engine.sampling_params import SamplingParams

EOS, FIRST_TIME, VOCAB = 10, 14, 30


@given(
    st.lists(st.one_of(st.integers(0, EOS - 1), st.integers(FIRST_TIME, VOCAB - 1)), max_size=6),
    st.integers(0, 2**32 - 1),
    st.one_of(st.none(), st.integers(0, 20)),
    st.floats(-6, 6),
)
def test_rules_are_those_of_transformers(output: list[int], seed: int, max_first: int | None, shift: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, FIRST_TIME:] += shift  # times all together likelier than text, or not
    config = SimpleNamespace(
        no_timestamps_token_id=FIRST_TIME - 1, eos_token_id=EOS, bos_token_id=EOS, max_initial_timestamp_index=max_first
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=2)(torch.tensor([[0, 0, *output]]), logits)
    before = logits.clone()
    assert torch.equal(apply_timestamp_rules(logits, output, FIRST_TIME, EOS, max_first), theirs)
    assert torch.equal(logits, before)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_the_cheapest_way_is_that_of_transformers(rows: int, columns: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.integers(-2, 3, (rows, columns)).astype(np.float64) if ties else rng.normal(size=(rows, columns))
    for mine, theirs in zip(align(costs), _dynamic_time_warping(costs), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 50])
def test_medians(length: int) -> None:
    values = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length))
    assert torch.equal(median_filter(values, 7), _median_filter(values[None], 7)[0])


def test_words_need_a_model_that_says_which_heads_follow_the_sound(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    del settings["alignment_heads"]
    path.write_text(json.dumps(settings))
    core = WhisperCore(EngineArgs.from_kwargs(model=str(folder)))
    start = settings["decoder_start_token_id"]
    audio = AudioInput(np.zeros(1600, np.float32).tobytes(), settings["no_timestamps_token_id"] + 1, True)
    with pytest.raises(InvalidRequestError, match="alignment_heads"):
        core.add_request(EngineCoreRequest("a", [start], SamplingParams(), task=audio))
    audio.word_timestamps = False
    core.add_request(EngineCoreRequest("a", [start], SamplingParams(max_tokens=1), task=audio))
    (output,) = core.step().outputs
    assert output.result is not None and output.result["speech"].token_ends is None
    # A prompt without the start token that the model's config names is answered all the same.
    core.add_request(EngineCoreRequest("b", [start + 1], SamplingParams(max_tokens=1), task=audio))
    (output,) = core.step().outputs
    assert output.result is not None and 0 <= output.result["speech"].no_speech_prob <= 1
