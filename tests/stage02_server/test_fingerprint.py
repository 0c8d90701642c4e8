"""system_fingerprint: which set-up answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from endpoints import ENDPOINTS, ask
from server_under_test import InProcessServer, RecordingEcho

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.fingerprint.install import system_fingerprint
from stage03_engine import __version__
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError

Make = Callable[..., InProcessServer]
WITH_IT = ("/v1/completions", "/v1/chat/completions")


def test_it_names_version_sizes_and_settings_and_changes_with_what_can_change_an_answer() -> None:
    def told(mode: str = "full", value: str | None = None, **settings: Any) -> str | None:
        args = FrontendArgs(fingerprint_mode=mode, fingerprint_value=value)
        return system_fingerprint(args, EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", **settings))

    plain = told()
    assert plain == told() and plain is not None and plain.startswith(f"stages-{__version__}-")
    assert len({plain, told(dtype="bfloat16"), told(block_size=8), told(seed=1)}) == 4
    assert str(told(data_parallel_size=2)).startswith(f"stages-{__version__}-dp2-")
    two = told(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert two is not None and two.startswith(f"stages-{__version__}-tp2-pp3-")
    assert told("hash", tensor_parallel_size=2, pipeline_parallel_size=3) == two.replace("-tp2-pp3", "")
    assert told("custom", "blue") == "blue" and told("none") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprint_mode": "custom"},
        {"fingerprint_value": "x"},
        {"fingerprint_mode": "custom", "fingerprint_value": ""},
    ],
)
def test_a_mode_and_a_value_need_each_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need each other"):
        FrontendArgs(**wrong).check()


@pytest.mark.parametrize("path", WITH_IT)
def test_answers_have_it_whole_and_beside_the_usage_of_a_stream(make_server: Make, path: str) -> None:
    config = ENDPOINTS[path].config()
    args = {"fingerprint_mode": "custom", "fingerprint_value": "blue"}
    server = make_server(RecordingEcho(0.0, config), config=config, **args)
    assert ask(server, path).json()["system_fingerprint"] == "blue"
    streamed = ask(server, path, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["system_fingerprint"] == "blue" and chunks[-1]["usage"]
    assert not any("system_fingerprint" in chunk for chunk in chunks[:-1])
    other = make_server(RecordingEcho(0.0, config), config=config, fingerprint_mode="none")
    assert ask(other, path).json()["system_fingerprint"] is None, "another server of this process"


@pytest.mark.parametrize("value", ["a\nb", "\udcff", "\x7f", "\0"])
def test_a_value_that_no_answer_can_hold_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(ConfigError, match="printable text"):
        FrontendArgs(fingerprint_mode="custom", fingerprint_value=value).check()
