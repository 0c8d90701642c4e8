"""No secrets in a recording."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stagetrace.redact import HIDDEN, redact_argv, redact_values

SECRET = st.text("abcdefghijXYZ0123456789_/+", min_size=12, max_size=30)


@given(
    SECRET,
    st.sampled_from(
        ["--api-key", "--API_KEY", "--hf-token", "--token", "--my-secret", "--ssl-keyfile-password", "-k-key"]
    ),
    st.booleans(),
)
def test_a_secret_never_stays_in_a_command_line(secret: str, flag: str, joined: bool) -> None:
    words = [f"{flag}={secret}"] if joined else [flag, secret]
    told = redact_argv(["serve", "gpt2", *words, "--port", "8000"])
    assert secret not in " ".join(told) and HIDDEN in " ".join(told)
    assert told[:2] == ["serve", "gpt2"] and told[-2:] == ["--port", "8000"] and len(told) == 4 + len(words)


def test_several_values_and_values_that_look_like_keys() -> None:
    assert redact_argv(["--api-key", "a", "b", "--port", "1"]) == ["--api-key", HIDDEN, HIDDEN, "--port", "1"]
    assert redact_argv(["--header", "sk-abcdef123456", "hf_abcdefgh"]) == ["--header", HIDDEN, HIDDEN]
    assert redact_argv(["generate", "gpt2", "my prompt", "--stop=x"], ["my prompt", "x"]) == [
        "generate", "gpt2", HIDDEN, f"--stop={HIDDEN}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "gpt2", "--max-num-batched-tokens", "512", "--long-prefill-token-threshold=2k", "--tokenizer", "my/folder"],
        ["--disable-uvicorn-access-log", "--seed", "3", "--trace", "traces"],
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert redact_argv(words) == words


def test_environment_values() -> None:
    given_values = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "x",
        "HF_TOKEN": "12",
    }
    assert redact_values(given_values) == given_values | {"OPENAI_API_KEY": HIDDEN, "HF_TOKEN": HIDDEN}
