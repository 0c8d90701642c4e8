"""`serve`: the dry run, the way to stage 2, the trace of phases 1 and 2."""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage01_cli.main import main
from stage02_server.cli_args import FrontendArgs
from stage03_engine.arg_utils import EngineArgs, engine_settings
from stage03_engine.args.fields import settings_of
from stagetrace import read_run, trace

BOTH = pytest.mark.parametrize("module", ["stage01_cli.main", "stage02_server.__main__"])
DUMMY = ["serve", "gpt2", "--load-format=dummy", "--device=cpu"]


@pytest.fixture(autouse=True)
def _no_settings() -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("STAGES_"):
            del os.environ[name]
    yield
    trace.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stage 2 replaced by a recorder of how it was called; it "exits" with 5."""
    calls: list[tuple[Any, ...]] = []
    fake = types.ModuleType("stage02_server.api_server")
    fake.serve = lambda *arguments: calls.append(arguments) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stage02_server.api_server", fake)
    return calls


def dry_run(capsys: pytest.CaptureFixture[str], *words: str, module: str = "stage01_cli.main") -> dict[str, list[str]]:
    """Setting -> [value, origin], as `--dry-run` prints them."""
    assert importlib.import_module(module).main([*DUMMY, "--dry-run", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = [line.split(maxsplit=2) for line in printed.out.splitlines() if line.startswith("  ")]
    return {name: rest for name, *rest in rows}


def test_the_dry_run_prints_every_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = dry_run(capsys)
    names = [setting.name for setting in [*engine_settings(), *settings_of(FrontendArgs)]]
    assert set(names) <= shown.keys()
    assert {"headless", "api_server_count", "model_path", "tokenizer_path", "num_layers"} <= shown.keys()


def test_the_dry_run_says_where_each_value_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("port: 9000\nblock-size: 32\nserved-model-name: [a, b]\nseed: 5\n")
    monkeypatch.setenv("STAGES_BLOCK_SIZE", "64")
    monkeypatch.setenv("STAGES_SEED", "6")
    shown = dry_run(capsys, f"--config={config}", "--max_num_seqs=1k", "--seed=7")
    assert shown["model"] == ["gpt2", "command line (model tag)"]
    assert shown["max_num_seqs"] == ["1000", "command line (--max-num-seqs)"]
    assert shown["seed"] == ["7", "command line (--seed)"]
    assert shown["block_size"] == ["64", "environment (STAGES_BLOCK_SIZE)"]
    assert shown["port"] == ["9000", f"config file ({config})"]
    assert shown["host"] == ["none", "default"]
    assert shown["trace_console"] == ["false", "default"]
    assert shown["dtype"][0] in ("float32", "bfloat16") and shown["dtype"][1].startswith("detected (")
    assert shown["max_model_len"] == ["1024", "detected (n_positions of the model)"]


def test_the_dry_run_starts_no_server(capsys: pytest.CaptureFixture[str], served: list[Any]) -> None:
    dry_run(capsys)
    assert served == []


@BOTH
def test_both_commands_hand_the_same_configuration_to_stage_2(module: str, served: list[Any]) -> None:
    words = [*DUMMY, "--block-size=4", "--port=0", "--served-model-name", "a", "b"]
    assert importlib.import_module(module).main(words) == 5
    [(vllm_config, frontend_args)] = served
    assert vllm_config == EngineArgs.from_kwargs(
        model="gpt2", load_format="dummy", device="cpu", block_size=4, log_level="INFO"
    )
    assert frontend_args == FrontendArgs(port=0, served_model_name=("a", "b"))


@pytest.mark.parametrize("words", [["gpt2"], ["--model", "gpt2"], ["gpt2", "--model=gpt2"], ["gpt-2"], []])
def test_the_model_is_a_tag_or_a_flag_or_the_default(words: list[str], served: list[Any]) -> None:
    assert main(["serve", *words, "--load-format=dummy"]) == 5
    assert served[0][0].model_config.model == ("gpt2" if words else "gpt2-tiny")


def test_lists_are_words_or_json(served: list[Any]) -> None:
    main([*DUMMY, "--served-model-name", '["a", "b"]'])
    os.environ["STAGES_SERVED_MODEL_NAME"] = '["a", "b"]'
    main(DUMMY)
    assert [call[1].served_model_name for call in served] == [("a", "b")] * 2


def test_both_commands_know_the_same_flags_and_refuse_alike(capsys: pytest.CaptureFixture[str]) -> None:
    def flags(module: str) -> dict[str, str | None]:
        parser = importlib.import_module(module).make_parser("serve")
        [commands] = [action for action in parser._actions if action.dest == "subparser"]
        return {flag: action.help for flag, action in commands.choices["serve"]._option_string_actions.items()}

    assert flags("stage01_cli.main") == flags("stage02_server.__main__")
    assert {"--dry-run", "--headless", "--api-server-count", "-asc"} <= flags("stage02_server.__main__").keys()
    said = []
    for module, program in (("stage01_cli.main", "stages"), ("stage02_server.__main__", "python -m stage02_server")):
        for words in (["--headless"], ["--api-server-count", "65"], ["-asc=0"], ["--dry-run=1"], ["--headles"]):
            assert importlib.import_module(module).main([*DUMMY, *words]) == 2
        for words in (["serv"], ["--no-such-flag"], []):
            assert importlib.import_module(module).main(words) == 2
        said.append(capsys.readouterr().err.replace(f"see {program}", "see PROGRAM").splitlines()[:7])
    assert said[0] == said[1] and all(line.startswith("stages: error: ") for line in said[0])


def test_every_heading_of_the_help_has_flags() -> None:
    parser = importlib.import_module("stage02_server.__main__").make_parser("serve")
    [commands] = [action for action in parser._actions if action.dest == "subparser"]
    groups = commands.choices["serve"]._action_groups
    assert len(groups) > 10 and not [group.title for group in groups if group.description and not group._group_actions]


def test_several_api_servers_are_a_branch_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(capsys, "-asc=2", f"--trace={tmp_path}")
    [decision] = read_run(tmp_path).named("serve.decision")
    assert decision.args == {"branch": "run_multi_api_server", "headless": False, "api_server_count": 2}


@BOTH
def test_phases_1_and_2_are_traced_in_order(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(capsys, f"--trace={tmp_path}", module=module)
    run = read_run(tmp_path)
    names = [
        "run.start",
        "cli.main",
        "cli.env_setup",
        "cli.parser_created",
        "cli.parsed",
        "cli.dispatch",
        "serve.model_tag",
        "serve.decision",
        "config.resolved",
    ]
    assert [event.name for event in run.events] == names
    assert {event.proc for event in run.events} == {"APIServer"}
    arguments = {event.name: event.args for event in run.events}
    assert arguments["cli.parsed"] == {"subparser": "serve"}
    assert arguments["cli.dispatch"] == {"function": "ServeSubcommand.cmd"}
    assert arguments["serve.model_tag"] == {"model": "gpt2", "source": "command line (model tag)"}
    assert arguments["serve.decision"] == {"branch": "run_server", "headless": False, "api_server_count": 1}


def test_the_trace_is_off_unless_asked_for(served: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(DUMMY) == 5
    assert not trace.on
    main([*DUMMY, "--trace-console"])
    lines = capfd.readouterr().err.splitlines()
    assert re.match(r"APIServer      \S+ phase 1 \[TRACE\] \(command.py\) cli.main argv=\['serve', 'gpt2'", lines[1])


def test_the_variable_stages_trace_turns_the_trace_on(tmp_path: Path, served: list[Any]) -> None:
    os.environ["STAGES_TRACE"] = str(tmp_path)
    main(DUMMY)
    assert read_run(tmp_path).named("serve.decision")


def test_an_error_leaves_nothing_recording() -> None:
    assert main(["serve", "--port=x"]) == 2
    assert not trace.on
