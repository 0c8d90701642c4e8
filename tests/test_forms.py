"""Every form of more than one, with every feature: the tokens of one worker in one process, or one refusal that names the setting.

The long forms try each pair; the short ones all kinds of requests under the two forms that share a model.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams

README = Path(__file__).parents[1] / "stage03_engine/frontend/features/data_parallel/README.md"
TIGHT: dict[str, Any] = {
    "max_model_len": 128, "block_size": 4, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 24, "max_num_seqs": 8,
}  # fmt: skip
"""Chunks, hits of the prefix cache, preemption."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "tight": TIGHT | {"check_invariants": True},
    "no prefix cache": TIGHT | {"enable_prefix_caching": False},
    "no chunks": TIGHT | {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "priority": TIGHT | {"scheduling_policy": "priority"},
    "fair": TIGHT | {"scheduling_policy": "fair"},
    "early decisions": TIGHT | {"async_scheduling": True},
    "drafts": TIGHT | {"speculative_config": NGRAM},
    "swapping": TIGHT | {"preemption_mode": "swap", "swap_space": 0.01},
    "plain backends": TIGHT | {"linear_backend": "torch", "attention_backend": "torch"},
    "batch invariant": TIGHT | {"batch_invariant": True},
    "int8": TIGHT | {"quantization": "int8"},
    "int4": TIGHT | {"quantization": "int4"},
    "bfloat16": TIGHT | {"dtype": "bfloat16"},
}
ROUNDED = ("int8", "int4", "bfloat16")  # each slice is rounded by itself, so the last digits differ
FORMS: dict[str, dict[str, Any]] = {
    "mp": {"distributed_executor_backend": "mp"},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "pp 2 without groups": {"pipeline_parallel_size": 2, "pipeline_groups": False},
}
REFUSED = {("pp", "early decisions"), ("pp", "drafts"), ("pp", "batch invariant")}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}}
PROMPTS = [
    "To be, or not to be, or not to be, or not", "ROMEO:", "What news from the north, my lord, and what of the king's men " * 3,
    "O", "First Citizen:", "To be, or not to be, that is", "JULIET:", "KING RICHARD III:",
]  # fmt: skip
ASKED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(n=4, seed=1, max_tokens=12, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=1),
    SamplingParams(seed=2, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-z ]{4,30}")),
    SamplingParams(seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(temperature=0, max_tokens=30, stop=["the", "\n\n"], min_tokens=4),
    SamplingParams(seed=4, max_tokens=12, min_p=0.01, repetition_penalty=1.3, logit_bias={40: 2.0}, bad_words=["the"]),
    SamplingParams(seed=5, max_tokens=12, top_k=20, presence_penalty=0.5, frequency_penalty=0.5),
]  # fmt: skip


def written(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def everything(**settings: Any) -> tuple[list[Any], list[float]]:
    """(the tokens of all kinds of requests, and of a beam search), (their logprobs)."""
    with LLM("gpt2-tiny", **settings) as llm:
        outputs = llm.generate(PROMPTS, ASKED)
        again = llm.generate(PROMPTS[:1] * 3, ASKED[0])  # what is cached now
        beams = llm.beam_search(["ROMEO:"], BeamSearchParams(beam_width=3, max_tokens=6))
    assert written(again) == written(outputs[:1]) * 3
    logprobs = outputs[2].outputs[0].logprobs
    assert logprobs is not None
    return [written(outputs), written(beams)], [value for place in logprobs for value in place.logprobs]


_found: dict[str, tuple[list[Any], list[float]]] = {}


def expected(name: str) -> tuple[list[Any], list[float]]:
    """With one worker in this process."""
    if name not in _found:
        _found[name] = everything(**SETTINGS[name])
    return _found[name]


SHORT = (("tp 2", "tight"), ("pp 2", "tight"))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=[] if (form, name) in SHORT else pytest.mark.long)
        for name in SETTINGS
        for form in FORMS
    ],
)
def test_every_feature_under_every_form(form: str, name: str) -> None:
    if any(kind in form and refused == name for kind, refused in REFUSED):
        with pytest.raises(ConfigError, match="^pipeline_parallel_size .*leave out") as caught:
            LLM("gpt2-tiny", **SETTINGS[name], **FORMS[form])
        assert "\n" not in str(caught.value)
        return
    tokens, logprobs = everything(**SETTINGS[name], **FORMS[form])
    if name not in ROUNDED:
        assert tokens == expected(name)[0]
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(logprobs, expected(name)[1], strict=True))


# Forms that only a server has

SERVERS: dict[str, tuple[str, ...]] = {
    "dp 2": ("-dp", "2"),
    "dp 3": ("-dp", "3"),  # more than cores
    "by prefix": ("-dp", "2", "--data-parallel-routing", "prefix"),
    "asc 2": ("-asc", "2"),
    "dp 2, asc 2": ("-dp", "2", "-asc", "2"),
    "dp 2 x tp 2": ("-dp", "2", "-tp", "2"),
    "asc 2, tp 2": ("-asc", "2", "-tp", "2"),
    "asc 2, pp 2": ("-asc", "2", "-pp", "2"),
    "dp 2 x pp 2, asc 2": ("-dp", "2", "-pp", "2", "-asc", "2"),
}
FEATURES: dict[str, tuple[str, ...]] = {
    "tight": ("--check-invariants",),
    "early decisions": ("--async-scheduling",),
    "drafts": ("--speculative-config", json.dumps(NGRAM)),
    "priority": ("--scheduling-policy", "priority"),
    "fair": ("--scheduling-policy", "fair"),
}
SMALL_ROOM = (
    "--max-model-len",
    "256",
    "--num-gpu-blocks-override",
    "40",
    "--max-num-batched-tokens",
    "32",
    "--max-num-seqs",
    "8",
)
BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 20, "ignore_eos": True},
    {"prompt": PROMPTS[1:4], "temperature": 0, "max_tokens": 12, "echo": True},
    {"prompt": PROMPTS[1], "n": 4, "seed": 1, "max_tokens": 12, "top_p": 0.9},
    {"prompt": PROMPTS[4], "temperature": 0, "max_tokens": 8, "logprobs": 0, "stream": True},
    {"prompt": PROMPTS[4], "seed": 2, "max_tokens": 24, "structured_outputs": {"regex": "[a-z ]{4,30}"}},
    {"prompt": PROMPTS[5], "temperature": 0, "max_tokens": 40, "response_format": {"type": "json_object"}, "stream": True},
    {"prompt": PROMPTS[6], "use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 6},
    {"prompt": PROMPTS[7], "temperature": 0, "max_tokens": 30, "stop": ["the", "\n\n"]},
    {"prompt": [[5, 6, 7, 8], [9]], "temperature": 0, "max_tokens": 5},
    {"prompt": "word " * 240, "temperature": 0, "max_tokens": 200},  # a 400, or few tokens
    {"prompt": "word " * 150, "temperature": 0, "max_tokens": 10, "n": 1},
]  # fmt: skip


def texts(answer: httpx.Response) -> Any:
    if answer.headers["content-type"].startswith("application/json"):
        body = answer.json()
        return [choice["text"] for choice in body["choices"]] if "choices" in body else body["error"]["message"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def answers_of(*flags: str) -> list[list[Any]]:
    """What a server answers, twice, to all bodies at once."""
    common = ("--host", "127.0.0.1", "--port", "0", "--timeout-keep-alive", "600")
    server = ServerProcess("gpt2-tiny", *common, *SMALL_ROOM, *flags)
    try:
        url = server.wait_until_ready()
        with httpx.Client(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
            wait_until(lambda: client.get("/health").status_code == 200, "not all servers are ready")

            def post(body: dict[str, Any]) -> Any:
                return texts(client.post("/v1/completions", json=body))

            with ThreadPoolExecutor(len(BODIES)) as pool:
                found = [list(pool.map(post, BODIES)) for _ in range(2)]
        server.process.terminate()
        assert server.wait() == 0
        assert not any("Traceback" in line for line in server.lines), server.lines
    finally:
        server.close()
    return found


TRIED = [
    (form, name) for form in SERVERS for name in FEATURES if form in ("dp 2, asc 2", "dp 2 x tp 2") or name == "tight"
]


@pytest.fixture(scope="module")
def of_one_server() -> list[list[Any]]:
    return answers_of()


@pytest.mark.long
@pytest.mark.parametrize(("form", "name"), TRIED)
def test_every_feature_under_every_form_of_server(form: str, name: str, of_one_server: list[list[Any]]) -> None:
    assert of_one_server[0] == of_one_server[1]
    assert answers_of(*SERVERS[form], *FEATURES[name]) == of_one_server


def test_the_readme_says_what_is_tried() -> None:
    """Its two tables, cell by cell."""
    text = README.read_text(encoding="utf-8").partition("## All forms, all features")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    first, second = rows[: 1 + len(SETTINGS)], rows[1 + len(SETTINGS) :]
    assert first[0] == ["", *FORMS] and [row[0] for row in first[1:]] == [*SETTINGS]
    for name, *cells in first[1:]:
        refused = [any(kind in form and of == name for kind, of in REFUSED) for form in FORMS]
        assert cells == ["refused" if no else "runs" if name in ROUNDED else "same" for no in refused], name
    assert second[0] == ["", *FEATURES] and [row[0] for row in second[1:]] == [*SERVERS]
    for form, *cells in second[1:]:
        assert cells == ["same" if (form, name) in TRIED else "" for name in FEATURES], form
