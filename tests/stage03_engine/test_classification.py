"""Classification heads against transformers: every family, whole and in chunks, with cached prefixes, preempted and swapped."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_classifiers import FAMILIES, classifier
from small_tokenizers import TEXTS, byte_level, metaspace, sentencepiece
from tokenizers import Tokenizer as Backend, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.features.pooling_inputs import encode_pair
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.hf_config import read_shape
from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import POOLING_TYPES, PoolingParams
from stagetrace import read_run, trace

ROOMY: dict[str, Any] = {"kv_cache_memory_bytes": 10_000_000, "check_invariants": True}
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 12, "max_num_seqs": 4, "num_gpu_blocks_override": 9, "max_model_len": 32, "block_size": 4,
    "long_prefill_token_threshold": 3, "check_invariants": True,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": ROOMY,
    "chunks of 7": ROOMY | {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preempted": TIGHT,
    "swapped": TIGHT | {"preemption_mode": "swap", "swap_space": 0.01},
    "no cache": TIGHT | {"enable_prefix_caching": False},
    "batch invariant": ROOMY | {"batch_invariant": True},
}
LOGITS = PoolingParams(task="classify", normalize=False)


def numbers(output: RequestOutput) -> torch.Tensor:
    assert output.finished and output.result
    return torch.tensor([array("f", vector).tolist() for vector in output.result["pooled"]])


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int], params: PoolingParams) -> torch.Tensor:
    """[1 or num_tokens, num_labels]: transformers' own answer where it has one, else its head on its hidden states."""
    if params.task == "classify" and params.pooling_type in (None, "LAST"):
        return model(torch.tensor([ids])).logits
    states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    if params.task == "classify":
        states = states[:1] if params.pooling_type == "CLS" else states.mean(0, keepdim=True)
    return model.score(states)


def assert_right(model: PreTrainedModel, output: RequestOutput, params: PoolingParams) -> None:
    wanted = logits_of(model, output.prompt_token_ids, params)
    wanted = wanted if params.normalize is False else wanted.softmax(-1)
    torch.testing.assert_close(numbers(output), wanted, atol=2e-5, rtol=1e-4)


all_params = st.builds(
    PoolingParams,
    task=st.sampled_from(["classify", "classify", "token_classify"]),
    pooling_type=st.sampled_from([None, *POOLING_TYPES]),
    normalize=st.sampled_from([None, True, False]),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equal_to_transformers_however_the_prompts_are_computed(family: str, layout: str, tmp_path: Path) -> None:
    model = classifier(tmp_path, family, num_labels=3)
    beginnings = [[token % 331 for token in range(3, 300, step)] for step in (1, 7)]
    prompts = st.builds(
        lambda ids, first, end: ids[first:end], st.sampled_from(beginnings), st.integers(0, 1), st.integers(5, 30)
    )
    with LLM(str(tmp_path), **LAYOUTS[layout]) as llm:

        @settings(max_examples=5)
        @given(st.lists(st.tuples(prompts, all_params), min_size=1, max_size=6))
        def check(asks: list[tuple[list[int], PoolingParams]]) -> None:
            outputs = llm.encode([ids for ids, _ in asks], [params for _, params in asks])
            for output, (_, params) in zip(outputs, asks, strict=True):
                assert_right(model, output, params)

        check()
        everything = [
            LOGITS,
            PoolingParams(task="classify", pooling_type="MEAN"),
            PoolingParams(task="token_classify"),
        ] * 2
        for output, params in zip(llm.encode([beginnings[0][:30]] * 6, everything), everything, strict=True):
            assert_right(model, output, params)
        _, again = (llm.encode(beginnings[1][:30], LOGITS)[0] for _ in range(2))
        assert_right(model, again, LOGITS)
        assert (again.num_cached_tokens > 0) == (layout != "no cache"), (
            "the keys and values of all but the last token do"
        )
        num_preemptions = llm.engine_core._core.scheduler.stats.num_preemptions
    assert (num_preemptions > 0) == (layout in ("preempted", "swapped", "no cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_with_classes_without_any_flag(family: str, tmp_path: Path) -> None:
    model = classifier(tmp_path, family, num_labels=2, tie_word_embeddings=family in ("gpt2", "llama"))
    with LLM(str(tmp_path), **ROOMY) as llm:
        assert llm.vllm_config.supported_tasks == ("classify", "token_classify")
        assert llm.vllm_config.shape.labels == ("LABEL_0", "LABEL_1"), "transformers does not write its default down"
        (output,) = llm.encode("to be, or not")
        assert_right(model, output, PoolingParams(task="classify"))
        for params, field in (
            (PoolingParams(), "task"),
            (PoolingParams(task="token_embed"), "task"),
            (PoolingParams(task="classify", dimensions=1), "dimensions"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                llm.encode("a", params)
            assert refused.value.param == field
        with pytest.raises(InvalidRequestError, match="not text"):
            llm.generate("a")


def test_a_relative_of_gpt2_answers_with_classes(tmp_path: Path) -> None:
    """Its output matrix is not there, as in every classifier, whatever its config.json says."""
    other = {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
    model = classifier(tmp_path, "gpt2", num_labels=2, **other)
    with LLM(str(tmp_path), **ROOMY) as llm:
        (output,) = llm.encode("to be, or not")
        assert_right(model, output, PoolingParams(task="classify"))


@pytest.mark.parametrize(
    ("settings_of_model", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 3, "problem_type": "regression"}, "identity"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        (
            {"num_labels": 2, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_the_config_says_what_becomes_of_logits(
    settings_of_model: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    model = classifier(tmp_path, "gpt2", **settings_of_model)
    with LLM(str(tmp_path), **ROOMY) as llm:
        (output,) = llm.encode([3, 5, 8])
        (raw,) = llm.encode([3, 5, 8], LOGITS)
    logits = logits_of(model, [3, 5, 8], LOGITS)
    wanted = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "identity": logits}[activation]
    torch.testing.assert_close(numbers(output), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(numbers(raw), logits, atol=2e-5, rtol=1e-4)


def test_the_servers_settings_count_for_what_the_request_leaves_open(tmp_path: Path) -> None:
    model = classifier(tmp_path, "llama", num_labels=4)
    with LLM(str(tmp_path), pooler_config={"pooling_type": "CLS", "use_activation": False}, **ROOMY) as llm:
        (output,) = llm.encode([3, 5, 8])
    assert_right(model, output, PoolingParams(task="classify", pooling_type="CLS", normalize=False))


def test_other_uses_of_a_model_than_its_own(tmp_path: Path) -> None:
    model = classifier(tmp_path, "llama", num_labels=3)
    with LLM(str(tmp_path), convert="embed", **ROOMY) as llm:
        (output,) = llm.encode([3, 5, 8], PoolingParams(normalize=False))
        states = model.base_model(torch.tensor([[3, 5, 8]])).last_hidden_state[0, -1:]
        torch.testing.assert_close(numbers(output), states, atol=2e-5, rtol=1e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with LLM(str(tmp_path), convert="classify", **ROOMY) as llm:
        (output,) = llm.encode([3, 5, 8])
        assert_right(model, output, PoolingParams(task="classify"))
    with pytest.raises(ConfigError, match=r"lacks 1 tensors: score\.weight"):
        LLM("gpt2-tiny", convert="classify", **ROOMY)
    unknown = EngineArgs.from_kwargs(model="gpt2", load_format="dummy", convert="classify").shape
    assert unknown.labels == ("LABEL_0", "LABEL_1") and unknown.architecture == "GPT2ForSequenceClassification"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name each class from 0 to 1 by a text; 1 has None"),
        ({"id2label": {"0": 7}}, "id2label"),
        ({"id2label": {"0": "\ud800"}}, "id2label"),
        ({"id2label": {}}, "id2label"),
        ({"id2label": ["a"]}, "id2label"),
        ({"id2label": None, "num_labels": 0}, "num_labels"),
        ({"id2label": None, "num_labels": 10**9}, "num_labels"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' is not one of single_label"),
        ({"sbert_ce_default_activation_function": "torch.nn.ReLU"}, "'torch.nn.ReLU' is not supported"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    classifier(tmp_path, "gpt2", num_labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=said):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"runner": "generate"}, "classification head"),
        ({"convert": "none"}, "needs convert embed or classify"),
        ({"pooler_config": {"dimensions": 4}}, "one number per class"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculate"),
    ],
)
def test_impossible_flags(flags: dict[str, Any], said: str, tmp_path: Path) -> None:
    classifier(tmp_path, "gpt2", num_labels=3)
    with pytest.raises(ConfigError, match=said):
        EngineArgs.from_kwargs(model=str(tmp_path), **flags)


def _with_pairs(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


BACKENDS = {
    "joined without a mark": byte_level(bos=False),
    "marked": _with_pairs(byte_level()),
    "sentencepiece": _with_pairs(sentencepiece()),
    "metaspace": metaspace(),
}
REFERENCES = {kind: PreTrainedTokenizerFast(tokenizer_object=backend) for kind, backend in BACKENDS.items()}
OURS = {kind: Tokenizer(backend, None) for kind, backend in BACKENDS.items()}


@pytest.mark.parametrize("kind", BACKENDS)
@given(
    one=st.sampled_from(TEXTS) | st.text(min_size=1, max_size=12),
    other=st.sampled_from(TEXTS) | st.text(min_size=1, max_size=12),
    keep=st.none() | st.integers(4, 40),
)
def test_pairs_are_joined_as_transformers_joins_them(kind: str, one: str, other: str, keep: int | None) -> None:
    reference = REFERENCES[kind]
    cut = {} if keep is None else {"truncation": "longest_first", "max_length": keep}
    wanted = reference(one, other, **cut)["input_ids"]
    assert encode_pair(OURS[kind], one, other, keep) == wanted


def test_the_trace_says_what_the_head_did(tmp_path: Path) -> None:
    classifier(tmp_path / "model", "gpt2", num_labels=3)
    trace.open(str(tmp_path / "trace"))
    try:
        with LLM(str(tmp_path / "model"), **ROOMY) as llm:
            llm.encode(
                [[3, 5, 8]] * 2, [PoolingParams(task="classify"), PoolingParams(task="token_classify", normalize=False)]
            )
    finally:
        trace.close()
    told = [event.args for event in read_run(tmp_path / "trace").events if event.name == "pooler.classified"]
    assert told == [
        {"rows": 1, "num_labels": 3, "activation": "softmax"},
        {"rows": 3, "num_labels": 3, "activation": "identity"},
    ]
