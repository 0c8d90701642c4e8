"""Flags of vLLM that are not built: harmless at the value that asks for nothing, and else refused with a reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st

from stage01_cli.main import main, make_parser
from stage03_engine.args.features.refused_flags.refused import accepts_key_of, add_refused, refused_toml
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
ENGINE = (["serve"], ["run-batch", "-i", "a", "-o", "b"], ["bench", "throughput"], ["bench", "latency"])
BENCH_SERVE = (["bench", "serve"],)
CASES = [
    (ENGINE, "--trust-remote-code", True), (ENGINE, "--no-trust-remote-code", True), (ENGINE, "--enable-cumem-allocator", False),
    (ENGINE, "--disable-cumem-allocator", True), (ENGINE, "--dp-sync-interval 16", True), (ENGINE, "--dp_sync_interval=16.0", True),
    (ENGINE, "--enable-moe-shared-loras", False), (ENGINE, "--kv-cache-dtype-skip-layers 0", False), (BENCH_SERVE, "--trust-remote-code", True),
    (BENCH_SERVE, "--lora-modules a=b", False), (BENCH_SERVE, "--hf-split train", False),
]  # fmt: skip


@pytest.mark.parametrize(("commands", "words", "accepted"), CASES, ids=[case[1] for case in CASES])
def test_commands_know_them(commands: tuple[list[str], ...], words: str, accepted: bool) -> None:
    for command in commands:
        parser = make_parser(command[0])
        if accepted:
            assert parser.parse_args([*command, *words.split()]) == parser.parse_args(command)
        else:
            with pytest.raises(ConfigError, match="is not supported.*: .*(adapter|dtype|data sets|allocator)"):
                parser.parse_args([*command, *words.split()])


@pytest.mark.parametrize(("short", "long"), [("-tp", "tensor-parallel-size"), ("-asc", "api-server-count")])
def test_short_names(short: str, long: str) -> None:
    parser = make_parser("serve")
    assert parser.parse_args(["serve", short, "2"]) == parser.parse_args(["serve", f"--{long}=2"])


REASONS = {
    "--hf-token x": "HF_TOKEN", "--enable-cumem-allocator": "torch's own allocator",
    "--hf-config-path x": "config.json", "--model-impl transformers": "the classes of this project", "--device-ids 1": "CUDA_VISIBLE_DEVICES",
    "--numa-bind": "VLLM_CPU_OMP_THREADS_BIND", "--worker-extension-cls a.B": "--worker-cls takes a worker of your own", "--watchdog-config {}": "hung",
    "--cpu-offload-gb 4": "weights stay", "--max-num-scheduled-tokens 9": "--max-num-batched-tokens", "--watermark 0.1": "held back",
    "--performance-mode throughput": "presets", "--diffusion-config {}": "diffusion",
    "--max-num-active-seqs 3": "--max-num-seqs", "--enable-mamba-cache-stochastic-rounding": "state-space",
    "--tokens-only": "always takes texts", "--cohere-format x": "Cohere's API", "--kv-sharing-fast-prefill": "between layers",
}  # fmt: skip
"""What is typed -> what the reason must be about. These once had the reason of another flag."""


@pytest.mark.parametrize(("words", "reason"), REASONS.items())
def test_the_reason_is_about_the_flag(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        make_parser("serve").parse_args(["serve", *words.split()])
    except ConfigError as error:
        said = str(error)
        assert "is not supported" in said
    else:
        said = capsys.readouterr().err.removeprefix("stages: warning: ")
        assert "is ignored" in said and said.count("\n") == 1
    assert reason in said.partition(": ")[2]


def test_a_hint_names_no_flag_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag of the tables with a letter missing: what it is taken for, if anything, can be used."""
    monkeypatch.setattr("stage03_engine.args.parser.refuse_absent", lambda flag: None)
    tables = refused_toml()
    flags = [
        flag for name in ("engine", "server") for flag in " ".join(tables[name].values()).replace(",", " ").split()
    ]
    typos = [flag.strip("+").partition("=")[0].rstrip("*")[:-1] for flag in flags[::7] if flag.startswith("--")]
    command = make_parser("serve")._subparsers._group_actions[0].choices["serve"]  # type: ignore[index,union-attr]
    for typo in [*typos, "--headles", "--tensor-parallel", "--api-server-coun"]:
        with pytest.raises(ConfigError) as refused:
            command.parse_args([typo, "1"])
        hint = str(refused.value).partition("did you mean ")[2].rstrip("?")
        action = command._option_string_actions.get(hint)
        assert not hint or (not hasattr(action, "refusal") and "built" not in (action.help or "")), (typo, hint)
    with pytest.raises(ConfigError, match="did you mean --max-num-seqs"):
        command.parse_args(["--max-num-seq", "1"])


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip().lower()


@given(st.sampled_from(["", "1", "auto", "0.5"]), st.text(max_size=5))
def test_one_value_is_harmless(harmless: str, value: str) -> None:
    parser = FlexibleArgumentParser(prog="test")
    add_refused(parser, {"the reason": f"--some-flag={harmless}"})
    assert vars(parser.parse_args([f"--some-flag={harmless}"])) == {}
    assume(number(value) != number(harmless))
    with pytest.raises(ConfigError, match=r"--some-flag is not supported.*: the reason"):
        parser.parse_args([f"--some-flag={value}"])


@given(st.sampled_from(["enable-x", "disable-x", "x"]), st.sampled_from(["", "+", "*"]))
def test_switches_and_their_opposites(name: str, mark: str) -> None:
    parser = FlexibleArgumentParser(prog="test")
    add_refused(parser, {"the reason": f"--{name}*" if mark == "*" else f"{mark}--{name}"})
    opposite = {"enable-x": "--disable-x", "disable-x": "--enable-x", "x": "--no-x"}[name]
    for flag, harmless in ((f"--{name}", mark != ""), (opposite, mark != "+")):
        if harmless:
            assert vars(parser.parse_args([flag])) == {}
        else:
            with pytest.raises(ConfigError, match=f"{flag} is not supported: the reason"):
                parser.parse_args([flag])
    assert parser.format_help().count("x") == argparse.ArgumentParser(prog="test").format_help().count("x")


@given(
    st.sampled_from(["enable-x", "disable-x", "x"]), st.sampled_from(["", "+", "*"]), st.sampled_from([True, False, None])
)  # fmt: skip
def test_a_config_file_says_a_switch_as_the_command_line_does(name: str, mark: str, value: bool | None) -> None:
    """`x: true` is `--x`, `x: false` is what turns it off again, and a key without a value is nothing."""
    table = {"the reason": f"--{name}*" if mark == "*" else f"{mark}--{name}"}
    parser = FlexibleArgumentParser(prog="test")
    add_refused(parser, table)
    opposite = {"enable-x": "--disable-x", "disable-x": "--enable-x", "x": "--no-x"}[name]
    words = {True: [f"--{name}"], False: [opposite], None: []}[value]

    def outcome(work: Callable[[], object]) -> str:
        try:
            work()
        except ConfigError as error:
            return str(error).partition(" ")[2]
        return "accepted"

    key = name.replace("-", "_")
    expected = outcome(lambda: parser.parse_args(words))
    assert outcome(lambda: accepts_key_of(table, key, value)) == expected
    assert not accepts_key_of(table, "y", value)


def test_keys_of_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command line accepts, refuses, or does not know."""
    file = tmp_path / "settings.yaml"
    harmless = (
        "trust-remote-code: false",
        "max_loras: 1",
        "hf-overrides: {}",
        "revision:",
        "enable-cumem-allocator: false",
        "grpc: false",
        "disable-log-requests: true",
        "download-dir: /models",
        "max-model-len: -1",
        "attention-backend: FLASH_ATTN",
        "cudagraph-capture-sizes: [1, 2, 4]",
    )
    refused = {
        "lora-dtype: half": "lora_dtype: 'half' is not one of auto, float16, bfloat16, float32",
        "lora-target-modules: [a]": "--lora-target-modules is not supported: adapters are cut like their layers",
        "enable-cumem-allocator: maybe": "--enable-cumem-allocator is not supported: ",
        "max-lora: 1": "unknown key 'max-lora'; did you mean",
    }

    def dry_run(text: str) -> int:
        file.write_text(text)
        return main(["serve", "gpt2-tiny", "--dry-run", "--config", str(file)])

    assert dry_run("\n".join(harmless)) == 0
    capsys.readouterr()
    for line, said in refused.items():
        assert dry_run(line) == 2
        assert capsys.readouterr().err.startswith(f"stages: error: config file {file}: {said}")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--preemption-mode", "swap"], "--preemption-mode"),
        (["--preemption_mode=swap"], "--preemption-mode"),
        (["--no-disable-any-whitespace"], "--no-disable-any-whitespace"),
        (["-sc", "{}"], "-sc"),
    ],
)
def test_flags_of_a_feature_that_was_taken_out(words: list[str], flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage03_engine.plugins.INDEX", ("stage03_engine.core.features.gone",))
    parser = FlexibleArgumentParser(prog="test")
    with pytest.raises(ConfigError, match=rf"^{flag} is unknown here, where gone is not installed$"):
        parser.parse_args(words)
