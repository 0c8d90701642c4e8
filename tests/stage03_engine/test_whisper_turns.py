"""Sound of several API keys: the model hears one request after the other, so keys take turns, and few are held at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from small_whisper import whisper_folder

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.whisper import whisper_core
from stage03_engine.core.features.whisper.whisper_core import WhisperCore
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.audio import AudioInput
from stage03_engine.sampling_params import SamplingParams

A, B = 0, 1
Make = Callable[[str], WhisperCore]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    cores: dict[str, WhisperCore] = {}

    def core(policy: str) -> WhisperCore:
        if policy not in cores:
            cores[policy] = WhisperCore(
                EngineArgs.from_kwargs(model=str(folder), scheduling_policy=policy, max_num_seqs=64)
            )
        return cores[policy]

    return core


def ask(core: WhisperCore, folder: Path, name: str, tenant: int | None = None, num_tokens: int = 5) -> None:
    given_ids = json.loads((folder / "generation_config.json").read_text())
    audio = AudioInput(np.zeros(1600, np.float32).tobytes(), given_ids["no_timestamps_token_id"] + 1, False)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    core.add_request(EngineCoreRequest(name, [given_ids["decoder_start_token_id"]], params, task=audio, tenant=tenant))


def run(core: WhisperCore) -> list[dict[str, int]]:
    """Until all have ended: the tokens of each step, by request."""
    steps: list[dict[str, int]] = []
    while core.has_unfinished_requests:
        steps.append({output.request_id: len(output.new_token_ids) for output in core.step().outputs})
        heard = sum(one.encoded is not None for one in core._listening.values())
        assert heard <= whisper_core.MOST_HEARD
    return steps


def test_the_crowd_of_one_key_does_not_keep_another_waiting(make: Make, folder: Path) -> None:
    core = make("fair")
    for number in range(12):
        ask(core, folder, f"a{number}", A)
    for _ in range(3):
        core.step()
    ask(core, folder, "b", B)
    steps = run(core)
    last = max(number for number, step in enumerate(steps) if "b" in step)
    assert last <= 6, "its five tokens come as if it had the half of the model"
    assert all(len([name for name in step if name[0] == "a"]) <= 1 for step in steps[1:last])


def test_with_fcfs_they_come_in_the_order_of_their_arrival(make: Make, folder: Path) -> None:
    core = make("fcfs")
    for number in range(12):
        ask(core, folder, f"a{number:02}")
    first = list(dict.fromkeys(name for step in run(core) for name in step))
    assert first == sorted(first) and len(first) == 12


@settings(max_examples=settings().max_examples // 3)
@given(
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    asked=st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 4), st.booleans()), max_size=25),
)
def test_each_gets_all_of_its_tokens_or_is_aborted(
    policy: str, asked: list[tuple[int | None, int, bool]], make: Make, folder: Path
) -> None:
    core = make(policy)
    for number, (tenant, num_tokens, _) in enumerate(asked):
        ask(core, folder, str(number), tenant, num_tokens)
    gone = [str(number) for number, (_, _, aborted) in enumerate(asked) if aborted]
    begun = core.step().outputs if asked else []
    ended = {output.request_id for output in begun if output.finish_reason is not None}
    core.abort_requests(gone)
    tokens = Counter({output.request_id: len(output.new_token_ids) for output in begun})
    for step in run(core):
        tokens.update(step)
    for number, (_, num_tokens, aborted) in enumerate(asked):
        name = str(number)
        assert tokens[name] == num_tokens or (aborted and name not in ended), name
    stats = core.make_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
