"""Precedence of the five sources, and the config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import EngineArgs, engine_settings
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import Resolved, resolve_settings
from stage03_engine.errors import ConfigError

PARSER = FlexibleArgumentParser(prog="test")
PARSER.add_argument("model_tag", nargs="?")
EngineArgs.add_cli_args(PARSER)
FIXED = ["--load-format=dummy", "--device=cpu", "--model=gpt2"]

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_model_len": st.integers(1, 1024),  # default None, detected
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),  # default auto, detected
    "seed": st.integers(-(2**63), 2**63 - 1),  # default only
    "gpu_memory_utilization": st.floats(0.01, 1.0),
    "enable_chunked_prefill": st.booleans(),
    "trace": st.sampled_from(["here", "there"]),
}
DEFAULTS = {
    "max_model_len": (1024, "detected"), "dtype": ("float32", "detected"), "seed": (0, "default"),
    "gpu_memory_utilization": (0.9, "default"), "enable_chunked_prefill": (True, "default"), "trace": (None, "default"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is detected must not depend on the machine that runs the tests."""
    monkeypatch.setattr("stage03_engine.args.features.number_format.number_format.bfloat16_flag", lambda *_: None)


def flag(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={value}"


@given(data=st.data())
def test_command_line_before_environment_before_file_before_default_before_detected(
    data: st.DataObject, tmp_path: Path
) -> None:
    layers: list[dict[str, Any]] = [
        {name: data.draw(values) for name, values in VALUES.items() if data.draw(st.booleans())} for _ in range(3)
    ]
    command_line, environment, file = layers
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({name.replace("_", "-"): value for name, value in file.items()}))  # JSON is YAML
    words = [*FIXED, f"--config={path}", *(flag(name, value) for name, value in command_line.items())]
    environ = {f"STAGES_{name.upper()}": str(value) for name, value in environment.items()}

    args = EngineArgs.from_cli_args(PARSER.parse_args(words), environ)
    _, sources = args.create_engine_config()

    for name in VALUES:
        expected = DEFAULTS[name]
        for layer, source in zip(layers, ("command line", "environment", "config file"), strict=True):
            if name in layer:
                expected = (layer[name], source)
                break
        if expected[0] == "auto":
            expected = DEFAULTS[name]
        assert (sources[name].value, sources[name].source) == expected


@given(data=st.data())
def test_one_value_means_the_same_from_every_source(data: st.DataObject, tmp_path: Path) -> None:
    values = {name: data.draw(strategy) for name, strategy in VALUES.items()}
    # The tests run with STAGES_CHECK_INVARIANTS set, which `from_kwargs` would see and the empty environments would not.
    fixed = {"model": "gpt2", "load_format": "dummy", "device": "cpu", "check_invariants": True}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(values | fixed))
    by_flags = PARSER.parse_args([flag(name, value) for name, value in (values | fixed).items()])
    by_environ = {f"STAGES_{name.upper()}": str(value) for name, value in (values | fixed).items()}

    configs = [
        EngineArgs.from_cli_args(by_flags, {}).create_engine_config()[0],
        EngineArgs.from_cli_args(PARSER.parse_args([]), by_environ).create_engine_config()[0],
        EngineArgs.from_cli_args(PARSER.parse_args([f"--config={path}"]), {}).create_engine_config()[0],
        EngineArgs.from_kwargs(**values, **fixed),
    ]

    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize(
    "content, message",
    [
        ("max-num-seq: 4", "unknown key 'max-num-seq'; did you mean max_num_seqs\\?"),
        ("tensor-parallel-siz: 2", "unknown key 'tensor-parallel-siz'; did you mean tensor_parallel_size\\?"),
        ("max_num_seqs: four", "max_num_seqs: 'four' is not an integer"),
        ("max_num_seqs: true", "max_num_seqs: True is not an integer"),
        ("max_num_seqs: 4.0", "max_num_seqs: 4.0 is not an integer"),
        ("max_num_seqs: null", "max_num_seqs: None is not an integer"),
        ("gpu_memory_utilization: .nan", "gpu_memory_utilization: nan is not a finite number"),
        (f"gpu_memory_utilization: 1{'0' * 400}", "gpu_memory_utilization: inf is not a finite number"),
        ("model: 2", "model: 2 is not text"),
        ("model: [gpt2]", "model: \\['gpt2'\\] is not text"),
        ("seed: 1\nblock-size: 2\nblock_size: 3", "block_size is given twice"),
        ("- a\n- b", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("seed: 2024-13-45", "is not YAML"),
        ("a: " + "[" * 5000, "is not YAML"),
    ],
)
def test_bad_config_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        EngineArgs.from_cli_args(PARSER.parse_args([f"--config={path}"]), {})
    assert str(path) in str(refusal.value)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    for name, message in [("missing.yaml", "No such file"), ("", "Is a directory"), ("latin.yaml", "not UTF-8")]:
        with pytest.raises(ConfigError, match=message):
            EngineArgs.from_cli_args(PARSER.parse_args([f"--config={tmp_path / name}"]), {})


@given(content=st.text(max_size=40))
def test_any_config_file_is_taken_or_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    try:
        EngineArgs.from_cli_args(PARSER.parse_args([f"--config={path}"]), {})
    except ConfigError as error:
        assert str(path) in str(error)


def test_empty_config_file_and_empty_variable_count_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# nothing yet\n")
    args = EngineArgs.from_cli_args(PARSER.parse_args([f"--config={path}"]), {"STAGES_SEED": ""})
    assert args.settings["seed"] == Resolved(0, "default")


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^environment variable STAGES_BLOCK_SIZE: 'big' is not an integer$"):
        EngineArgs.from_cli_args(PARSER.parse_args([]), {"STAGES_BLOCK_SIZE": "big"})


def test_unknown_variables_are_no_error() -> None:
    args = EngineArgs.from_cli_args(PARSER.parse_args([]), {"STAGES_TYPO": "1", "PATH": "/bin"})
    assert {resolved.source for resolved in args.settings.values()} == {"default"}


def test_the_origin_names_flag_variable_and_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 3")
    words = [f"--config={path}", "--block-size=8"]
    settings = EngineArgs.from_cli_args(PARSER.parse_args(words), {"STAGES_TRACE": "dir"}).settings
    assert settings["block_size"].origin == "command line (--block-size)"
    assert settings["trace"].origin == "environment (STAGES_TRACE)"
    assert settings["seed"].origin == f"config file ({path})"
    assert settings["dtype"].origin == "default"


def test_the_positional_model_goes_before_environment_and_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: from-file")
    environ = {"STAGES_MODEL": "from-environment"}

    def model(*words: str, environ: dict[str, str] = environ) -> Any:
        return EngineArgs.from_cli_args(PARSER.parse_args([f"--config={path}", *words]), environ).settings["model"]

    assert model("tag") == Resolved("tag", "command line", "model tag")
    assert model("--model=flag").origin == "command line (--model)"
    assert model("same", "--model=same").value == "same"
    assert model().value == "from-environment"
    assert model(environ={}).value == "from-file"
    with pytest.raises(ConfigError, match="two models: 'tag' and --model 'flag'"):
        model("tag", "--model=flag")


def test_given_values_are_checked_like_all_others() -> None:
    with pytest.raises(ConfigError, match=r"--block-size: 2\.5 is not an integer"):
        resolve_settings(engine_settings(), {"block_size": 2.5}, environ={})
