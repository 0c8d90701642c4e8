"""Speculative decoding in the whole engine: the same tokens with and without, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafting
import pytest
from drafting import counts_of
from prometheus_client import CollectorRegistry

from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.llm import LLM
from stage03_engine.outputs import CompletionOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run, trace

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MAX_LEN = 160
COMMON: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 8, "num_threads": 1}
ROOMY = {"num_gpu_blocks_override": 200}
REPETITIVE = "First Citizen:\nWe are all resolved. First Citizen:\nWe are all resolved. First Citizen:\nWe"
PROMPTS = [
    REPETITIVE,
    "To be, or not to be",
    "a a a a a a a a",
    "ROMEO:\nI will. I will. I will.\n",
    "KING RICHARD:",
    "and the and the and",
]
PARAMS = [*drafting.PARAMS[:5], drafting.PARAMS[7]]  # one for each prompt, and none with rules


def run(**settings: Any) -> tuple[list[CompletionOutput], dict[str, int]]:
    with LLM("gpt2-tiny", **COMMON | settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
        numbers = {} if settings.get("multiprocess") else counts_of(llm)
    return outputs, numbers


@pytest.fixture(scope="module")
def plain() -> tuple[list[CompletionOutput], dict[str, int]]:
    return run(**ROOMY)


SETTINGS = {
    "roomy": ROOMY,
    "small chunks": ROOMY | {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "no chunks": ROOMY | {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_LEN, "max_num_seqs": 6},
    "preemption": {"num_gpu_blocks_override": 1 + MAX_LEN // 8},
    "preemption, small chunks": {"num_gpu_blocks_override": 21, "max_num_batched_tokens": 16, "max_num_seqs": 6},
    "multiprocess": {"num_gpu_blocks_override": 21, "multiprocess": True},
}


@pytest.mark.slow(keep=("roomy", "preemption, small"))
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_with_and_without(name: str, plain: tuple) -> None:
    """Greedy, and seeded sampling too: a draw depends on the seed, the position and the logits only."""
    outputs, numbers = run(**SETTINGS[name], speculative_config=NGRAM)
    for wanted, got in zip(plain[0], outputs):
        assert (got.text, got.finish_reason, got.stop_reason) == (wanted.text, wanted.finish_reason, wanted.stop_reason)
        assert got.token_ids == wanted.token_ids
        if wanted.logprobs is not None:
            assert len(got.logprobs) == len(got.token_ids)
            for a, b in zip(wanted.logprobs, got.logprobs):
                assert (a.token_ids, a.sampled_rank) == (b.token_ids, b.sampled_rank)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    if numbers:
        assert numbers["drafted"] >= numbers["accepted"] > 0
        assert numbers["preempted"] > 0 or "preemption" not in name
        if name == "roomy":
            assert numbers["steps"] < plain[1]["steps"]


def test_a_stop_inside_accepted_tokens_cuts_the_rest() -> None:
    """A loop of the prompt is accepted several tokens at a time; wherever the request is to stop, it stops there."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        wanted = llm.generate("a a a a a a a a", greedy)[0].outputs[0].token_ids
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=NGRAM) as llm:
        for end in range(1, 25):
            params = SamplingParams(temperature=0, max_tokens=end, ignore_eos=True, logprobs=0)
            got = llm.generate("a a a a a a a a", params)[0].outputs[0]
            assert (got.token_ids, len(got.logprobs), got.finish_reason) == (wanted[:end], end, "length")
        for token in set(wanted):
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, stop_token_ids=[token])
            got = llm.generate("a a a a a a a a", params)[0].outputs[0]
            end = wanted.index(token) + 1
            assert (got.token_ids, len(got.logprobs), got.stop_reason) == (wanted[:end], end, token)
        stats = llm.engine_core._core.scheduler.stats.counts
        assert stats.get("spec_decode_num_accepted_tokens", 0) > 24


def test_the_text_does_not_depend_on_how_many_tokens_come_at_once() -> None:
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        tokenizer = llm.tokenizer
    ids = tokenizer.encode("abcdef and the rest")
    # "c" is complete first, "bcd" begins first.
    for stops in (["bcd", "c"], ["c", "bcd"], ["d", "f a"], ["zzz"]):
        texts = set()
        for size in (1, 2, 3, len(ids)):
            detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stops))
            found = None
            for start in range(0, len(ids), size):
                found = detokenizer.update(ids[start : start + size])
                if found is not None:
                    break
            detokenizer.finish()
            texts.add((detokenizer.next_text(delta=False), found))
        assert len(texts) == 1


def test_a_stop_string_in_the_middle_of_several_tokens_cuts_text_and_tokens() -> None:
    """The answer is the one that tokens coming one by one would have given."""
    from stage03_engine.frontend.output_processor import OutputProcessor
    from stage03_engine.messages import EngineCoreOutput, TokenLogprobs

    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        processor = OutputProcessor(llm.tokenizer)
        ids = llm.tokenizer.encode("one STOP two")
        params = SamplingParams(stop=["STOP"], logprobs=0)
        processor.add_request(llm.input_processor.process_inputs("r", "x", params))
    logprobs = [TokenLogprobs([i], [0.0], 1) for i in ids]
    [output], aborted = processor.process_outputs([EngineCoreOutput("r", ids, logprobs)], IterationStats())
    completion = output.outputs[0]
    assert (completion.text, completion.stop_reason, aborted) == ("one ", "STOP", ["r"])
    count = next(n for n in range(len(ids)) if "STOP" in llm.tokenizer.decode(ids[:n]))
    assert completion.token_ids == ids[:count] and [e.token_ids for e in completion.logprobs] == [
        [i] for i in ids[:count]
    ]


def test_metrics_and_trace_tell_the_acceptance(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    trace.hold("LLM")
    trace.open(str(tmp_path))
    try:
        with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=NGRAM) as llm:
            logger = PrometheusStatLogger(llm.vllm_config, registry, "m")
            logger.record(llm.engine_core._core.scheduler.make_stats(), IterationStats())
            llm.generate(REPETITIVE, PARAMS[0])
            for _ in range(2):  # the numbers count since the start: the same ones again add nothing
                logger.record(llm.engine_core._core.scheduler.make_stats(), IterationStats())
    finally:
        trace.close()
    verified = read_run(tmp_path).named("spec.verified")
    labels = {"model_name": "m", "engine": "0"}
    numbers = {
        name: registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", labels)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert numbers == {
        "drafts": len(verified),
        "draft_tokens": sum(event.args["drafted"] for event in verified),
        "accepted_tokens": sum(event.args["accepted"] for event in verified),
    }
    assert numbers["accepted_tokens"] > 0
    scheduled = read_run(tmp_path).named("spec.scheduled")
    assert [event.args["num_tokens"] for event in scheduled] == [event.args["drafted"] for event in verified]
    assert len(read_run(tmp_path).named("spec.proposed")) >= len(verified)
