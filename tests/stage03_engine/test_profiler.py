"""What a profile holds: the switches of torch's profiler, and vLLM's `--profiler-config`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.profiler.profiler import start_profile, stop_profile
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}


def profiled(folder: Path, **settings: Any) -> tuple[str, list[dict[str, Any]]]:
    """(name of the file, events) of the profile of a short answer."""
    with LLM("gpt2-tiny", **SMALL, **settings) as llm:
        core = llm.engine_core._core  # type: ignore[attr-defined]
        assert start_profile(core)
        llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=2))
        assert stop_profile(core)
    [file] = folder.iterdir()
    raw = file.read_bytes()
    return file.name, json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)["traceEvents"]


def said(events: list[dict[str, Any]]) -> set[str]:
    """What the events say beyond their times."""
    kinds = {event.get("cat") for event in events}
    args = {key for event in events for key in event.get("args", {})}
    return {
        word
        for word, found in {
            "stack": "python_function" in kinds,
            "shapes": "Input Dims" in args,
            "memory": any(event.get("name") == "[memory]" for event in events),
        }.items()
        if found
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"stack"}),
        ({"torch_profiler_with_stack": False}, set()),
        ({"torch_profiler_with_stack": False, "torch_profiler_record_shapes": True}, {"shapes"}),
        ({"torch_profiler_with_stack": False, "torch_profiler_with_memory": True}, {"memory"}),
    ],
)
def test_a_profile_holds_what_was_asked_for(settings: dict[str, Any], expected: set[str], tmp_path: Path) -> None:
    name, events = profiled(tmp_path, profiler_dir=str(tmp_path), **settings)
    assert name.endswith(".pt.trace.json.gz") and said(events) == expected


def test_vllms_form_says_the_same(tmp_path: Path) -> None:
    given = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False}
    more = {
        "torch_profiler_record_shapes": True,
        "torch_profiler_use_gzip": False,
        "delay_iterations": 0,
        "ignore_frontend": True,
    }
    name, events = profiled(tmp_path, profiler_config=given | more)
    assert name.endswith(".pt.trace.json") and said(events) == {"shapes"}


def test_a_flag_goes_before_it() -> None:
    given = {"profiler": "torch", "torch_profiler_dir": "a", "torch_profiler_with_flops": True}
    config = EngineArgs.from_kwargs(model="gpt2-tiny", profiler_config=given, profiler_dir="b").observability_config
    assert (config.profiler_dir, config.torch_profiler_with_flops) == ("b", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"profiler": "cuda"}, "profiler_config: profiler 'cuda' is not supported, only 'torch'"),
        ({"profiler": "torch"}, "profiler 'torch' and torch_profiler_dir belong together"),
        ({"torch_profiler_dir": "a"}, "profiler 'torch' and torch_profiler_dir belong together"),
        ({"profiler": "torch", "torch_profiler_dir": 3}, "torch_profiler_dir must be a text, not 3"),
        ({"torch_profiler_with_stack": 1}, "torch_profiler_with_stack must be true or false, not 1"),
        ({"delay_iterations": 2}, "delay_iterations 2 is not supported; leave it out"),
        ({"delay_iterations": False}, "delay_iterations False is not supported"),
        ({"proton_profiler_dir": "x"}, "proton_profiler_dir is not supported; leave it out"),
        ({"with_stack": True}, "with_stack is not supported; leave it out"),
        ("[]", "is not a JSON object"),
    ],
)
def test_what_it_cannot_say_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", profiler_config=given)
    assert "\n" not in str(refused.value)
