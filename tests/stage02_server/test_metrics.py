"""/metrics: vLLM's names and labels, and numbers that agree with the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, byte_config

from stage02_server.features.admin import metrics_text
from stage03_engine.frontend.features.prometheus.prometheus import CacheConfigInfo
from stage03_engine.messages import EngineCoreOutputs, EngineReady, SchedulerStats

LABELS = {"model_name", "engine"}
CACHE_LABELS = {
    "block_size",
    "cache_dtype",
    "kv_cache_max_concurrency",
    "kv_cache_size_tokens",
    "num_gpu_blocks",
    "engine",
}
VLLM_METRICS = {  # name -> kind; what vLLM documents for every model that generates text on one engine
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:mm_cache_queries": "counter",
    "vllm:mm_cache_hits": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:cache_config_info": "gauge",
}


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    flags = ("--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
    server = ServerProcess("gpt2-tiny", *flags)
    server.wait_until_ready()
    yield server
    server.close()


def samples(text: str) -> dict[str, float]:
    """The value of each sample, summed over its labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@pytest.mark.parametrize(("name", "kind"), VLLM_METRICS.items())
def test_a_metric_of_vllm_is_there_with_its_labels(server: InProcessServer, name: str, kind: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(server.request("GET", "/metrics").text)}
    family = families[name]
    assert family.type == kind and family.documentation
    labels = set(family.samples[0].labels) - {"le", "finished_reason", "reason"}
    assert labels >= CACHE_LABELS if name == "vllm:cache_config_info" else labels == LABELS


def cache_of(text: str) -> dict[str, str]:
    """The labels of the one cache."""
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == "vllm:cache_config_info")
    (sample,) = family.samples
    assert sample.value == 1
    return sample.labels


def test_the_size_of_the_cache_is_what_the_engine_has(real: ServerProcess) -> None:
    labels = cache_of(httpx.get(f"{real.url}/metrics").text)
    blocks, tokens = int(labels["num_gpu_blocks"]), int(labels["kv_cache_size_tokens"])
    block_bytes = 16 * 2 * 1536 * 4  # tokens, keys and values, layers of vectors, bytes
    assert blocks == 50_000_000 // block_bytes and tokens == blocks * int(labels["block_size"])
    assert float(labels["kv_cache_max_concurrency"]) == tokens / 512  # gpt2-tiny's context


@pytest.mark.parametrize(
    ("num_gpu_blocks", "max_model_len", "tokens", "concurrency"),
    [(100, 64, 1600, 25.0), (100, 70, 1400, 20.0), (7, 64, 112, 1.75), (0, 64, 0, 0.0)],
)
def test_room_is_counted_in_requests_of_full_length(
    num_gpu_blocks: int, max_model_len: int, tokens: int, concurrency: float
) -> None:
    """Of a length that is no multiple of the block size, a part of the last block stays unused, as in vLLM."""
    config = byte_config(max_model_len)
    engine = SimpleNamespace(vllm_config=config, ready=None, engine_core=None)
    registry = CollectorRegistry()
    registry.register(CacheConfigInfo(engine))  # type: ignore[arg-type]
    assert b"cache_config_info{" not in generate_latest(registry)  # the engine is not ready
    engine.ready = EngineReady(num_gpu_blocks, max_model_len)
    labels = cache_of(generate_latest(registry).decode())
    assert (labels["kv_cache_size_tokens"], labels["kv_cache_max_concurrency"]) == (str(tokens), str(concurrency))


def test_every_way_to_end_is_there_from_the_start(make_server: Callable[..., InProcessServer]) -> None:
    text = make_server().request("GET", "/metrics").text
    for reason in ("stop", "length", "abort", "error"):
        assert (
            f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="byte-model"}} 0.0' in text
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_numbers_agree_with_the_answers(make_server: Callable[..., InProcessServer], stream: bool) -> None:
    server = make_server()
    wishes: list[dict[str, Any]] = [
        {"prompt": "abc", "max_tokens": 5},
        {"prompt": ["ab", "c"], "max_tokens": 1},
        {"prompt": "abcd", "max_tokens": 7, "n": 3, "temperature": 1},
    ]
    for wish in wishes:
        assert server.post("/v1/completions", wish | {"stream": stream}).status_code == 200
    values = samples(server.request("GET", "/metrics").text)
    answers, outputs = 6, 5 + 2 + 3 * 7
    assert values["vllm:generation_tokens_total"] == outputs == values["vllm:request_generation_tokens_sum"]
    assert values["vllm:request_success_total"] == answers == values["vllm:e2e_request_latency_seconds_count"]
    assert values["vllm:time_to_first_token_seconds_count"] == answers
    assert values["vllm:request_num_preemptions_count"] == answers and values["vllm:request_num_preemptions_sum"] == 0
    assert values["vllm:inter_token_latency_seconds_count"] == outputs - answers
    assert values["vllm:request_time_per_output_token_seconds_count"] == answers - 2  # not for answers of one token
    assert values["vllm:prompt_tokens_total"] == 3 + 3 + 3 * 4
    assert values["vllm:iteration_tokens_total_sum"] == outputs + values["vllm:prompt_tokens_total"]
    assert (values["vllm:request_params_n_count"], values["vllm:request_params_n_sum"]) == (4, 1 + 1 + 1 + 3)
    assert values["vllm:request_params_max_tokens_sum"] == 5 + 1 + 1 + 7
    assert values["vllm:request_max_num_generation_tokens_sum"] == 5 + 1 + 1 + 7


def test_the_intervals_of_a_request_add_up(real: ServerProcess) -> None:
    body = {"prompt": "To be, or", "max_tokens": 20, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(f"{real.url}/v1/completions", json=body).status_code == 200
    values = samples(httpx.get(f"{real.url}/metrics").text)
    total = {
        name: values[f"vllm:{name}_seconds_sum"]
        for name in (
            "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time",
            "e2e_request_latency", "time_to_first_token", "request_time_per_output_token",
        )
    }  # fmt: skip
    prefill, decode = total["request_prefill_time"], total["request_decode_time"]
    assert min(total.values()) > 0
    assert prefill + decode == pytest.approx(total["request_inference_time"])
    assert total["request_queue_time"] + prefill == pytest.approx(total["time_to_first_token"])
    assert total["time_to_first_token"] + decode == pytest.approx(total["e2e_request_latency"])
    assert decode == pytest.approx(19 * total["request_time_per_output_token"])


class Crowded(RecordingEcho):
    """Its requests were preempted twice, and five more wait, two of them for their grammars."""

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        for output in outputs.outputs:
            output.num_preemptions = 2
        outputs.scheduler_stats = SchedulerStats(
            num_waiting=5, num_deferred=2, kv_cache_usage=0.5, prefix_cache_queries=9, prefix_cache_hits=4
        )
        return outputs


def test_why_requests_wait_and_how_often_they_were_preempted(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(Crowded())
    assert server.post("/v1/completions", {"prompt": "ab", "max_tokens": 3}).status_code == 200
    text = server.request("GET", "/metrics").text
    labels = 'engine="0",model_name="byte-model"'
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 3.0' in text
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 2.0' in text
    assert 'vllm:request_num_preemptions_bucket{engine="0",le="1.0",model_name="byte-model"} 0.0' in text
    assert 'vllm:request_num_preemptions_bucket{engine="0",le="2.0",model_name="byte-model"} 1.0' in text


def test_the_text_is_made_a_few_times_in_a_row_and_then_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key protects it, and it costs more than ten times as much as /health."""
    now, made = 100.0, []
    monkeypatch.setattr(metrics_text, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(metrics_text, "generate_latest", lambda registry: made.append(now) or b"%d" % len(made))
    text, registry = metrics_text.MetricsText(), CollectorRegistry()
    assert [text.get(registry) for _ in range(9)] == [b"1", b"2", b"3", *[b"4"] * 6]
    for _ in range(1000):
        now += 0.01
        text.get(registry)
        assert now - made[-1] < metrics_text.SECONDS + 1e-6
    assert len(made) <= 4 + 10 / metrics_text.SECONDS
    now += 3600
    assert [text.get(registry) for _ in range(9)] == [b"%d" % n for n in range(len(made) - 3, len(made) + 1)] + [
        b"%d" % len(made)
    ] * 5
