"""How deep the trace goes: `--trace-layers`, and one event per transform of the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import stages_in_this_process
from torch import nn

from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import open_trace
from stagetrace import Event, read_run, trace

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 128, "device": "cpu"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 160, "rms_norm_eps": 1e-6, "eos_token_id": 256,
    "model_type": "llama", "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def run(folder: Path, model: str, params: Any, prompts: Any = "ROMEO:", **settings: Any) -> tuple[list[Event], Any]:
    with LLM(model, trace=str(folder), **(SMALL | settings)) as llm:
        outputs = llm.generate(prompts, params)
    return list(read_run(folder).events), [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(params=["gpt2", "llama", "gpt2, batch invariant"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, int, dict[str, Any]]:
    """(name, number of layers, settings)"""
    if request.param == "llama":
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
        return str(tmp_path / "model"), 3, {"load_format": "dummy"}
    return "gpt2-tiny", 6, {"batch_invariant": "invariant" in request.param}


def test_each_forward_pass_is_embeddings_layers_and_a_final_norm(
    model: tuple[str, int, dict[str, Any]], tmp_path: Path
) -> None:
    name, num_layers, settings = model
    events, tokens = run(tmp_path / "deep", name, GREEDY, trace_layers=True, **settings)
    flat, same_tokens = run(tmp_path / "flat", name, GREEDY, **settings)
    assert tokens == same_tokens
    assert {e.name for e in flat if e.name.startswith("model.")} == {"model.forward", "model.logits"}
    spans = [e for e in events if e.name.startswith("model.") and e.name != "model.logits"]
    layer = ("B attention", "B kv_write", "E kv_write", "E attention", "B mlp", "E mlp")
    layers = [(part[0], f"model.{part[2:]}", number) for number in range(num_layers) for part in layer]
    # Llama rotates instead
    learnt = [(ph, "model.positional_embedding", None) for ph in "BE"] if "gpt2" in name else []
    one_pass = [
        ("B", "model.forward", None), ("B", "model.embedding", None), *learnt, ("E", "model.embedding", None), *layers,
        ("B", "model.final_norm", None), ("E", "model.final_norm", None), ("E", "model.forward", None),
    ]  # fmt: skip
    assert [(e.ph, e.name, e.args.get("layer")) for e in spans] == one_pass * 5
    assert [e.step for e in spans] == [step for step in range(1, 6) for _ in one_pass]


def test_stages_show_the_models_own_layers(tmp_path: Path) -> None:
    """The embedding is in the first stage, the final norm in the last: what stands there in the others is no part of the model."""
    with stages_in_this_process():
        events, _ = run(tmp_path, "gpt2-tiny", GREEDY, trace_layers=True, pipeline_parallel_size=3)
    spans = [
        (e.name.removeprefix("model."), e.args.get("layer"))
        for e in events
        if e.name.startswith("model.") and e.ph == "B"
    ]
    layers = [(part, layer) for layer in range(6) for part in ("attention", "kv_write", "mlp")]
    inner = [("embedding", None), ("positional_embedding", None), *layers, ("final_norm", None)]
    assert [span for span in spans if span[0] not in ("forward", "logits")] == inner * 5


def test_without_the_flag_there_are_no_hooks() -> None:
    def hooks(llm: LLM) -> int:
        core: Any = llm.engine_core
        model: nn.Module = core._core.executor.worker.model_runner.model
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    with LLM("gpt2-tiny", **SMALL) as llm:
        assert hooks(llm) == 0
    with LLM("gpt2-tiny", trace_layers=True, **SMALL) as llm:
        assert hooks(llm) == 2 + 2 + 6 * 4 + 2


def test_a_backend_of_one_launch_has_no_span_for_its_kv_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stage04_kernels import paged_attention

    monkeypatch.setattr(paged_attention, "in_one", lambda *args: paged_attention.torch_attention(*args), raising=False)
    events, _ = run(
        tmp_path, "gpt2-tiny", GREEDY, trace_layers=True, attention_backend="stage04_kernels.paged_attention:in_one"
    )
    assert {"model.attention"} == {e.name for e in events} & {"model.attention", "model.kv_write"}


class Before(LogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: Any, rows: Any) -> Any:
        return logits


class After(Before):
    def is_argmax_invariant(self) -> bool:
        return True


def test_every_transform_of_a_step_is_named_with_the_rows_that_it_concerns(tmp_path: Path) -> None:
    one: dict[str, Any] = {"max_tokens": 1}
    params = [
        SamplingParams(temperature=0, **one),
        SamplingParams(temperature=0, logit_bias={5: 1.0}, allowed_token_ids=[5, 6], bad_words=["x"], **one),
        SamplingParams(seed=1, top_k=3, repetition_penalty=1.1, **one),
        SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1, **one),
        SamplingParams(seed=1, **one),
        SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), **one),
    ]
    classes = [f"{__name__}:Before", f"{__name__}:After"]
    events, _ = run(tmp_path, "gpt2-tiny", params, ["K"] * len(params), logits_processors=classes)
    by_step: dict[int | None, list[tuple[str, int]]] = {}
    for event in events:
        if event.name == "sampler.transform":
            by_step.setdefault(event.step, []).append((event.args["transform"], event.args["rows"]))
    first = by_step[1]
    assert first == [
        ("allowed_tokens", 1), ("forbidden_tokens", 1), ("bias", 1), ("penalties", 1), ("custom:Before", 5), ("argmax", 2),
        ("temperature", 3), ("custom:After", 3), ("min_p", 1), ("top_k", 2), ("top_p", 1), ("random_draw", 3),
    ]  # fmt: skip
    assert [step for name, step in by_step.items() if name != 1] == [
        [("grammar_mask", 1), ("custom:Before", 1), ("argmax", 1)]
    ]


def test_start_up_tells_settings_worker_and_memory(tmp_path: Path) -> None:
    events, _ = run(tmp_path, "gpt2-tiny", GREEDY)
    names = {e.name for e in events}
    assert "executor.created" in names and "config.resolved" not in names  # over before anybody knew of the trace
    folder = tmp_path / "engine"
    secret = {"prefix_caching_hash_seed": "do not tell"}
    trace.hold("LLM")
    settings = {**SMALL, "kv_cache_memory_bytes": None, "max_num_seqs": 4, "trace": str(folder), **secret}
    with LLM("gpt2-tiny", multiprocess=True, **settings) as llm:  # as the commands do: held first, opened later
        open_trace(llm.vllm_config)
        trace.close()
    named = {e.name: e.args for e in read_run(folder).events}
    resolved = named["config.resolved"]["settings"]
    assert resolved["max_num_seqs"] == "4 from command line (--max-num-seqs)"
    assert resolved["prefix_caching_hash_seed"] == "***"
    assert "cores" in resolved["num_threads"] and named["config.resolved"]["defaults"] > 20
    assert named["worker.created"]["device"] == "cpu" and named["worker.created"]["threads"] >= 1
    memory = named["memory.profiled"]
    assert memory["available"] <= max(0, int(memory["total"] * memory["utilization"]) - memory["used"])
