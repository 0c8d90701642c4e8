"""Penalties, masks, biases, bad words and min_tokens through the whole engine, against transformers and against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import GPT2LMHeadModel

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.logits_rules.logits_rules import RequestRules
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stage04_kernels.lab import logits_reference, sampler_reference as reference
from stagetrace import read_run

SMALL = {"kv_cache_memory_bytes": 50_000_000}
CONFIG = EngineArgs.from_kwargs(model="gpt2-tiny", max_model_len=64)
PROCESSOR = InputProcessor(CONFIG, init_tokenizer_from_configs(CONFIG))
EOS, NAN = 0, float("nan")
PROMPTS = ["To be, or", "ROMEO:", "My lord, my lord, my"]


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("gpt2-tiny", **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> Any:
    return GPT2LMHeadModel.from_pretrained(llm.vllm_config.model_config.model_path, dtype=torch.float32).eval()


def tokens(llm: LLM, prompt: str | list[int], **params: Any) -> list[int]:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 24} | params))[0].outputs[0].token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {0: 4.0, 7: 2.5, 300: -9.0}}, {"sequence_bias": [[[0], 4.0], [[7], 2.5], [[300], -9.0]]}),
        (
            {"logit_bias": {EOS: 8.0}, "min_tokens": 20},
            {"sequence_bias": [[[EOS], 8.0]], "min_new_tokens": 20},
        ),
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(llm: LLM, model: Any, prompt: str, ours: dict, theirs: dict) -> None:
    ids = torch.tensor([llm.tokenizer.encode(prompt)])
    wanted = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=EOS, eos_token_id=EOS, **theirs)
    assert tokens(llm, prompt, **ours) == wanted[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_rules_equal_a_plain_loop(llm: LLM, model: Any, prompt: str) -> None:
    """The definition, token by token, on transformers' logits."""
    plain = tokens(llm, prompt, ignore_eos=True)
    bad = llm.tokenizer.decode(plain[1:3]).strip()
    allowed = [token for token in range(2048) if token not in plain[5:6]]
    wishes = {"frequency_penalty": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {plain[0]: 1}}
    seen = tokens(llm, prompt, bad_words=[bad], allowed_token_ids=allowed, ignore_eos=True, **wishes)
    bad_ids = [llm.tokenizer.encode(prefix + bad) for prefix in ("", " ")]
    prompt_ids, output = llm.tokenizer.encode(prompt), []
    for _ in range(24):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + output])).logits[0, -1].tolist()
        logits = logits_reference.allowed(logits, set(allowed))
        logits = logits_reference.forbidden(logits, logits_reference.bad_words(bad_ids, output))
        logits = logits_reference.bias(logits, {plain[0]: 1.0})
        logits = logits_reference.penalties(logits, prompt_ids, output, 1.1, 0.9, 0.4)
        output.append(reference.descending(logits)[0])
    assert seen == output != plain
    assert bad not in llm.tokenizer.decode(seen)


def everything(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        seed=seed, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, frequency_penalty=0.5, presence_penalty=-0.3,
        repetition_penalty=1.2, logit_bias={5: 1.5, 9: -3.0}, bad_words=["the", "my lord"], min_tokens=10, logprobs=2,
        allowed_token_ids=list(range(1500)), max_tokens=30, **more,
    )  # fmt: skip


def test_seeds_reproduce_in_any_batch_with_everything_on() -> None:
    """Alone, among others, and with preemptions."""
    others = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0), SamplingParams(max_tokens=35, seed=3)]
    with LLM("gpt2-tiny", **SMALL) as llm:
        alone = [llm.generate(prompt, everything(i))[0].outputs[0] for i, prompt in enumerate(PROMPTS)]
        raw = [output.logprobs[0].logprobs for output in alone]
        batch = llm.generate([*PROMPTS[::-1], "K", "Q"], [*map(everything, (2, 1, 0)), *others])
        assert [o.outputs[0].token_ids for o in batch[:3]] == [o.token_ids for o in alone[::-1]]
        bare = [llm.generate(p, SamplingParams(max_tokens=1, seed=0, logprobs=2))[0].outputs[0] for p in PROMPTS]
    for with_rules, without in zip(raw, bare):
        assert with_rules[1:] == pytest.approx(without.logprobs[0].logprobs[1:], abs=1e-5), "those of the raw logits"
    with LLM(
        "gpt2-tiny",
        num_gpu_blocks_override=9,
        max_model_len=64,
        block_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=8,
    ) as llm:
        squeezed = llm.generate([*PROMPTS, "K", "Q"], [*map(everything, (0, 1, 2)), *others])
        assert llm.engine_core._core.scheduler.stats.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in squeezed[:3]] == [o.token_ids for o in alone]


def test_min_tokens_holds_back_every_end(llm: LLM) -> None:
    eager = {"logit_bias": {EOS: 100.0}, "min_tokens": 7}
    assert tokens(llm, "K", **eager)[7:] == [EOS]
    assert tokens(llm, "K", **eager, max_tokens=None)[7:] == [EOS]
    assert tokens(llm, "K", min_tokens=7, stop_token_ids=[9], logit_bias={9: 100.0})[7:] == [9]
    plain = llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    late = SamplingParams(temperature=0, max_tokens=12, stop=[plain.text[:3]], min_tokens=11)
    assert llm.generate("To be, or", late)[0].outputs[0].text == plain.text, "its stop string stands too early"
    assert len(tokens(llm, [5] * 488, min_tokens=10, max_tokens=None, ignore_eos=True)) == 24


def test_truncation_keeps_the_end_of_the_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("To be, or not to be, that is the question")
    assert tokens(llm, ids, truncate_prompt_tokens=4) == tokens(llm, ids[-4:])
    assert tokens(llm, ids, truncate_prompt_tokens=99) == tokens(llm, ids)
    request = PROCESSOR.process_inputs("r", [5] * 90, SamplingParams(truncate_prompt_tokens=-1))
    assert len(request.prompt_token_ids) == 63 and request.sampling_params.max_tokens == 1


def test_spaces_between_special_tokens_is_no_matter_for_byte_level_tokenizers(llm: LLM) -> None:
    wishes = {"logit_bias": {EOS: 100.0}, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 2}
    for value in (True, False):
        params = SamplingParams(temperature=0, spaces_between_special_tokens=value, **wishes)
        assert llm.generate("K", params)[0].outputs[0].text == "<|endoftext|>" * 2


def test_requests_without_rules_make_none(tmp_path: Any) -> None:
    with LLM("gpt2-tiny", multiprocess=True, trace=str(tmp_path), **SMALL) as llm:
        llm.generate(["a", "b"], SamplingParams(max_tokens=4, seed=1, top_p=0.9))
        llm.generate(["a", "b"], [SamplingParams(max_tokens=4, ignore_eos=True), everything(1)])
    events = read_run(tmp_path).named("sampler.rules")
    assert len(events) == 30 and {e.args["penalised_rows"] for e in events} == {1}
    assert {e.args["allowed"] for e in events} == {1500}


IMPOSSIBLE = [
    ("frequency_penalty", 2.1), ("frequency_penalty", NAN), ("presence_penalty", -2.1), ("presence_penalty", NAN),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", 1e9), ("repetition_penalty", NAN),
    ("logit_bias", {1: NAN}), ("allowed_token_ids", []), ("bad_words", [" "]), ("bad_words", ["a"] * 300),
    ("bad_words", ["a" * 200]), ("min_tokens", -1), ("min_tokens", 17), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("n", 0), ("n", 129), ("best_of", 129), ("best_of", 0),
    ("best_of", 2),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} must be .*got") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {2048: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2048]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS, 5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens"),
        ({"min_tokens": 63, "max_tokens": None}, "min_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
    ],
)
def test_what_only_the_model_makes_impossible(params: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        PROCESSOR.process_inputs("r", [1, 2, 3], SamplingParams(**params))
    assert caught.value.param == field


def test_the_edges_are_allowed() -> None:
    SamplingParams(
        frequency_penalty=-2, presence_penalty=2, repetition_penalty=0.001, min_tokens=16, n=128, best_of=128
    )
    SamplingParams(best_of=5, n=2, output_kind=RequestOutputKind.FINAL_ONLY)


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5),
    output=st.lists(st.integers(0, 2), max_size=8),
)
def test_bad_words_of_any_length_are_found_in_the_output(words: list[list[int]], output: list[int]) -> None:
    rules = RequestRules.of(SamplingParams(bad_words_token_ids=words), vocab_size=3)
    assert rules is not None
    found = rules.forbidden(np.array(output, dtype=np.int64))
    assert set(found.tolist()) == logits_reference.bad_words(words, output)


def test_bad_words_are_taken_with_and_without_a_space_before_them() -> None:
    request = PROCESSOR.process_inputs("r", "K", SamplingParams(bad_words=[" lord", "lord"]))
    encode = init_tokenizer_from_configs(CONFIG).encode
    assert sorted(request.sampling_params.bad_words_token_ids) == sorted([encode("lord"), encode(" lord")])


def test_bad_words_of_one_request_are_tokenized_once_and_remembered_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several API keys the time of an answer must not tell what another key sent."""
    texts: list[str] = []
    tokenize = InputProcessor.tokenize

    def counted(self: InputProcessor, text: Any, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        return tokenize(self, text, add_special_tokens)

    monkeypatch.setattr(InputProcessor, "tokenize", counted)
    mine, theirs = SamplingParams(bad_words=["lord"]), SamplingParams(bad_words=["lord"])
    asked = [PROCESSOR.process_inputs(f"r{i}", "K", params) for i, params in enumerate((mine, mine, theirs))]
    assert texts == ["K", " lord", "lord", "K", "K", " lord", "lord"]
    mine.bad_words.append("king")  # by a caller in Python
    asked.append(PROCESSOR.process_inputs("r3", "K", mine))
    assert [len(each.sampling_params.bad_words_token_ids) for each in asked] == [2, 2, 2, 4]


def test_biases_are_cut_at_100(llm: LLM, model: Any) -> None:
    """Two tokens with the same bias after the cut: the one that the model prefers wins."""
    ids = llm.tokenizer.encode("To be, or")
    with torch.inference_mode():
        preferred, other = model(torch.tensor([ids])).logits[0, -1].topk(2).indices.tolist()
    assert tokens(llm, ids, logit_bias={preferred: 100.0, other: 5000.0}, max_tokens=1) == [preferred]
    assert tokens(llm, ids, logit_bias={preferred: -5000.0, other: -100.0, 7: 0.5}, max_tokens=1)[0] not in (
        preferred,
        other,
    )
