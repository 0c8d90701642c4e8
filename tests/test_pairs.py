"""Every two settings that no manifest calls a conflict work together: the same requests get the same tokens.

As few engines as possible are started, each with so many settings that all pairs are covered: a dozen for nearly all, `--all` for the rest.
`-m long` starts one for each pair.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import small_eagle
from safetensors.torch import load_file, save
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
from stage03_engine.frontend.features.call_forms.call_forms import LoRARequest
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.plugins import features
from stage03_engine.sampling_params import SamplingParams

_KEPT = tempfile.TemporaryDirectory()  # as long as this module
HEAD = small_eagle.write(Path(_KEPT.name) / "head", small_eagle.random_head(small_eagle.SMALL))
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "draft model": {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}},
    "EAGLE head": {"speculative_config": {"method": "eagle", "model": HEAD, "num_speculative_tokens": 3}},
    "swap": {"swap_space": 0.01, "preemption_mode": "swap"},
    "ahead": {"async_scheduling": True},
    "processors": {"logits_processors": ("logits_as_they_are:LogitsAsTheyAre",)},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "worker process": {"distributed_executor_backend": "mp"},
    "own worker": {"worker_cls": "worker_as_it_is:WorkerAsItIs"},
    "adapters": {"enable_lora": True, "max_loras": 2},
    "folder": {
        "kv_transfer_config": {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
        },
        "prefix_caching_hash_seed": "seed",
    },
    "offloading": {"kv_offloading_size": 0.005},
    "plain products": {"linear_backend": "torch"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8", "linear_backend": "torch"},
    "cache of 8 bits": {"kv_cache_dtype": "int8"},
    "batch invariant": {"batch_invariant": True},
    "eager": {"enforce_eager": True},
    "threads by lateness": {"adaptive_threads": True},
    "memory as it comes": {"prefault_kv_cache": False},
    "unbound": {"cpu_omp_threads_bind": "nobind"},
    "asleep": {"enable_sleep_mode": True},
    "learner": {"enable_weight_updates": True},
    "embeds": {"enable_prompt_embeds": True},
    "checked": {"check_invariants": True},
    "traced layers": {"trace": "FOLDER", "trace_layers": True},
    "profiled": {"profiler_dir": "FOLDER"},
    "fair": {"scheduling_policy": "fair"},
    "priority": {"scheduling_policy": "priority"},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    "few blocks": {"num_gpu_blocks_override": 16, "block_size": 8},
    "reference": {"attention_backend": "reference"},
    "one grammar": {"grammar_cache_size": 1},
}
ELSEWHERE = {
    "quantized_checkpoints": "another checkpoint, test_quantized_checkpoints",
    "nodes": "several machines, test_machines",
    "multimodal": "another model, test_multimodal",
    "cascade_attention": "Triton kernels, test_cascade",
    "compilation": "compiles for seconds, test_compilation",
    "in_process": "of the server, test_in_process",
    "pooling": "another kind of model, test_together",
    "data_parallel": "several engines, test_data_parallel",
    "disaggregation": "several engines, test_disaggregation",
    "front_ends": "several API servers, test_api_servers",
    "log_config": "the log, test_environment",
    "logging_stats": "the log, test_environment",
    "hub": "where files are, test_model_path",
    "hf_overrides": "another model, test_hf_overrides",
    "skip_tokenizer": "an engine without texts, test_skip_tokenizer",
    "generation_config": "defaults of a model's own file, test_generation_config",
}
"""Features whose settings are not tried here -> where they are."""
APART = [
    ("fair", "priority"), *itertools.combinations(("int8", "int4", "fp8"), 2), ("batch invariant", "reference"),
    *itertools.combinations(("drafts", "draft model", "EAGLE head"), 2),
    ("tensor parallel", "fp8"),  # each worker rounds its slice of a matrix by a scale of its own
]  # fmt: skip
"""One setting cannot have two values; and what makes other tokens, and should."""
BY_VALUE = {
    ("folder", "no prefix cache"): "needs enable_prefix_caching",
    ("offloading", "no prefix cache"): "needs enable_prefix_caching",
    ("draft model", "folder"): "kv_transfer_config cannot be combined with a draft model",
    ("EAGLE head", "folder"): "kv_transfer_config cannot be combined with an EAGLE head",
} | {
    (one, "profiled"): "profiler_dir records the engine process"
    for one in ("tensor parallel", "pipeline", "worker process")
}
"""What a check refuses by the values of more than two settings -> what it says."""
OTHER_TOKENS = ("int8", "int4", "fp8", "cache of 8 bits", "plain products", "adapters")
"""Other weights, other keys and values, other inputs of int8 products, one more request: those in a pair are the only ones that may change its tokens."""


def requests_of(adapter: str | None) -> dict[str, tuple[list[int], SamplingParams]]:
    """One for each thing that a request can ask of a step."""
    first, more = list(range(5, 30)), {"max_tokens": 8, "ignore_eos": True}
    found = {
        "greedy": (first, SamplingParams(temperature=0, **more)),
        "the same again": (first, SamplingParams(temperature=0, **more)),
        "seeded": ([7, 8, 9], SamplingParams(temperature=0.9, seed=3, top_k=20, **more)),
        "penalties": ([7, 7, 7, 7], SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=3, **more)),
        "grammar": ([40, 41], SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
        "logprobs": (first[:17], SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, **more)),
        "two answers": ([50], SamplingParams(n=2, temperature=1.0, seed=5, **more)),
    }  # fmt: skip
    if adapter is not None:
        found["adapter"] = (first, SamplingParams(temperature=0, lora=adapter, **more))
        found["adapter, logprobs"] = (
            first[:17],
            SamplingParams(temperature=0, lora=adapter, logprobs=2, prompt_logprobs=1, **more),
        )
        found["adapter, two answers"] = ([50], SamplingParams(n=2, temperature=1.0, seed=5, lora=adapter, **more))
    return found


def as_embeds(model: Path, ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
    """The same prompt as rows of the model's own table."""
    tensors = load_file(model / "model.safetensors")
    rows = next(tensor for name, tensor in tensors.items() if name.endswith("wte.weight"))[ids]
    return [0] * len(ids), msgspec.structs.replace(params, prompt_embeds=save({"x": rows.contiguous()}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_layers(tmp_path_factory.mktemp("pairs") / "model", 2))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def answers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch
) -> Callable[..., dict[str, list[list[int]]]]:
    """The tokens of each request under these settings; those of a set of settings are found once."""
    monkeypatch_module.setenv(
        "PYTHONPATH", str(Path(__file__).parent / "support"), prepend=os.pathsep
    )  # for worker processes
    adapter, known = write_adapter(model.parent / "adapter", model, seed=1), dict[frozenset[str], Any]()

    def find(names: frozenset[str]) -> dict[str, list[list[int]]]:
        if names not in known:
            folder = tmp_path_factory.mktemp("run")
            given = {} if "adapters" not in names else {"lora_modules": (f"poet={adapter}",)}
            given |= {key: value for name in names for key, value in SETTINGS[name].items()}
            given = {key: str(folder / key) if value == "FOLDER" else value for key, value in given.items()}
            if "folder" in names:
                place = {"shared_storage_path": str(folder / "blocks")}
                given["kv_transfer_config"] = given["kv_transfer_config"] | {"kv_connector_extra_config": place}
            asked = requests_of("poet" if "adapters" in names else None)
            if "embeds" in names and "pipeline" not in names:  # a pipeline takes none: test_prompt_embeds
                for name in ("greedy", "seeded", "two answers"):
                    asked[name] = as_embeds(model, *asked[name])
            with LLM(str(model), **SMALL | given) as llm:
                if "asleep" in names:  # on waking, all that was built at start is built again
                    llm.generate([[9, 9]], SamplingParams(max_tokens=2))
                    llm.sleep(1 if "adapters" in names else 2)
                    llm.wake_up()
                outputs = llm.generate(
                    [prompt for prompt, _ in asked.values()], [params for _, params in asked.values()]
                )
                # of all beams none is nearly as good as another one, so the last bits of numbers do not decide
                beams = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
                lora_request = LoRARequest("poet") if "adapters" in names else None
                outputs += llm.beam_search([list(range(7, 19))], beams, lora_request=lora_request)
            known[names] = {
                name: [list(answer.token_ids) for answer in output.outputs]
                for name, output in zip([*asked, "beams"], outputs, strict=True)
            }
        found: dict[str, list[list[int]]] = known[names]
        return found

    return find


def conflict_of(*names: str) -> tuple[str, str] | None:
    """The two settings among these that a manifest calls a conflict."""
    given = {key for name in names for key in SETTINGS[name]}
    declared = (pair for feature in features("stage03_engine") for pair in feature.conflicts)
    return next((pair for pair in declared if set(pair) <= given), None)


PAIRS = list(itertools.combinations(SETTINGS, 2))
POSSIBLE = [pair for pair in PAIRS if conflict_of(*pair) is None and pair not in APART and pair not in BY_VALUE]
IMPOSSIBLE = [pair for pair in PAIRS if conflict_of(*pair) is not None]


DOZEN = 12


def groups() -> list[frozenset[str]]:
    """Sets of settings without a conflict in which each possible pair occurs: greedily few."""
    left, found = set(POSSIBLE), []
    while left:
        group = set(min(left))
        for name in sorted(SETTINGS, key=lambda one: -sum(one in pair for pair in left)):
            if all(one == name or tuple(sorted((one, name), key=list(SETTINGS).index)) in POSSIBLE for one in group):
                group.add(name)
        found.append(frozenset(group))
        left -= {pair for pair in left if set(pair) <= group}
    return found


def cases() -> Iterator[Any]:
    """The groups, first those with the most pairs that no earlier one has. A dozen have 592 of the 601 pairs; the others are slow."""
    waiting, left = groups(), set(POSSIBLE)
    for number in range(len(waiting)):
        best = max(waiting, key=lambda group: sum(set(pair) <= group for pair in left))
        waiting.remove(best)
        left -= {pair for pair in left if set(pair) <= best}
        yield pytest.param(best, id="+".join(sorted(best)), marks=[pytest.mark.slow] if number >= DOZEN else [])


def check(names: frozenset[str], answers: Callable[..., dict[str, list[list[int]]]]) -> None:
    """The tokens are those of an engine without all the settings that may not change any."""
    found, base = answers(names), answers(frozenset(name for name in names if name in OTHER_TOKENS))
    assert found == base, names


def test_every_feature_with_settings_is_tried() -> None:
    tried = {key for given in SETTINGS.values() for key in given}
    for feature in features("stage03_engine"):
        own = set[str]()
        for kind in filter(dataclasses.is_dataclass, feature.settings.values()):
            for each in dataclasses.fields(kind):
                own |= (
                    {one.name for one in dataclasses.fields(each.default)}
                    if dataclasses.is_dataclass(each.default)
                    else {each.name}
                )
        assert not own or own & tried or feature.name in ELSEWHERE, f"{feature.name} is in none of the pairs"


@pytest.mark.parametrize("names", cases())
def test_settings_work_together(names: frozenset[str], answers: Callable[..., dict[str, list[list[int]]]]) -> None:
    check(names, answers)


@pytest.mark.long
@pytest.mark.parametrize("pair", POSSIBLE, ids=" and ".join)
def test_each_pair_works_together(pair: tuple[str, str], answers: Callable[..., dict[str, list[list[int]]]]) -> None:
    check(frozenset(pair), answers)


@pytest.mark.parametrize("pair", IMPOSSIBLE, ids=" and ".join)
def test_a_conflict_is_named_with_its_reason(pair: tuple[str, str]) -> None:
    conflict = conflict_of(*pair)
    assert conflict is not None
    why = next(each.conflicts[conflict] for each in features("stage03_engine") if conflict in each.conflicts)
    with pytest.raises(ConfigError, match=f"{conflict[0]} cannot be combined with {conflict[1]}: {why}"):
        EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, **SETTINGS[pair[0]] | SETTINGS[pair[1]])


@pytest.mark.parametrize("pair", BY_VALUE, ids=" and ".join)
def test_what_is_refused_by_its_values(pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=BY_VALUE[pair]):
        EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, **SETTINGS[pair[0]] | SETTINGS[pair[1]])


def test_every_declared_conflict_is_among_the_pairs() -> None:
    declared: set[tuple[str, str]] = {pair for feature in features("stage03_engine") for pair in feature.conflicts}
    assert {conflict_of(*pair) for pair in IMPOSSIBLE} == declared
