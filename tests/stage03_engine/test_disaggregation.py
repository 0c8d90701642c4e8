"""`--disaggregate P:D`: what it says is read, or refused in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.disaggregation.manifest import CONFLICTS, sizes_of
from stage03_engine.frontend.features.disaggregation.roles import Roles

WRONG: list[tuple[dict[str, Any], str]] = [
    *[({"disaggregate": text}, "disaggregate must be P:D, such as 1:1") for text in ("", "1", "1:", ":1", "0:1", "1:0", "1:1:1", "a:b", "-1:2", "40:40", "1.5:1")],
    ({"disaggregate": "1:1", "data_parallel_size": 2}, "disaggregate cannot be combined with data_parallel_size: P:D says how many"),
    ({"disaggregate": "1:1", "enable_prefix_caching": False}, "disaggregate needs enable_prefix_caching"),
    ({"disaggregate": "1:1", "speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}}, "disaggregate cannot be combined with a draft model"),
    *[({"disaggregate": "1:1"} | other, f"disaggregate cannot be combined with {next(iter(other))}: {CONFLICTS[next(iter(other))]}") for other in (
        {"kv_transfer_config": {"kv_connector": "P2pZmqConnector"}}, {"kv_offloading_size": 0.1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"}, {"data_parallel_rank": 1}, {"data_parallel_external_lb": True}, {"data_parallel_hybrid_lb": True},
        {"data_parallel_size_local": 1}, {"data_parallel_start_rank": 1}, {"enable_weight_updates": True},
    )],
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), WRONG, ids=str)
def test_one_line_says_what_is_wrong(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EngineArgs.from_kwargs(model="gpt2-tiny", **given)
    assert "\n" not in str(caught.value)


def test_several_api_servers_are_refused() -> None:
    """The launcher says so late, and nothing is started."""
    config = EngineArgs.from_kwargs(model="gpt2-tiny", disaggregate="1:1")
    several = dataclasses.replace(config, front_ends=dataclasses.replace(config.front_ends, num_front_ends=2))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="disaggregate needs api_server_count 1"):
        several.hooks("client")


def test_sizes() -> None:
    assert (sizes_of("1:1"), sizes_of(" 2:3 "), sizes_of("63:1")) == ((1, 1), (2, 3), (63, 1))


def test_the_log_names_who_computes_prompts(tmp_path: Path) -> None:
    """As the client says it at start: every engine once, on the side that its settings put it on."""
    config = EngineArgs.from_kwargs(model="gpt2-tiny", disaggregate="2:3")
    roles = Roles(config, tmp_path)
    prefill, decode = str(roles).split("Decode")
    for engine in range(5):
        is_producer = roles.of(config, engine).kv_transfer_config.saves
        assert (f"EngineCore_DP{engine}" in prefill, f"EngineCore_DP{engine}" in decode) == (
            is_producer,
            not is_producer,
        )
