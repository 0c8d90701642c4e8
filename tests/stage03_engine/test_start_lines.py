"""Lines of `vllm serve` as guides, images and old scripts have them: which of them start, and what the others are told."""

from __future__ import annotations

import shlex

import pytest

from stage01_cli.main import main
from stage03_engine.mixins import is_there

STARTS = """
--host 0.0.0.0 --port 8000
--dtype auto --api-key token-abc123
--dtype half --max-model-len 512 --gpu-memory-utilization 0.9
--revision main --tokenizer-revision main --download-dir /models
-O3
-O 0
--compilation-config '{"level": 3}'
--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'
--max-logprobs 100 --logprobs-mode raw_logprobs
--limit-mm-per-prompt '{"image": 0, "video": 0}' --mm-processor-cache-gb 0
--config-format hf --tokenizer-mode hf --model-impl auto
--tokenizer-mode auto --trust-remote-code
--structured-outputs-config '{"backend": "auto"}'
--structured-outputs-config.backend guidance
--attention-backend FLASH_ATTN
--attention-backend TRITON_ATTN
--max-model-len auto
--max-model-len -1
--max-model-len 0.5k
--tensor-parallel-size 1 --pipeline-parallel-size 1 --data-parallel-size 1
-tp 1 -pp 1 -dp 1
--enable-prefix-caching --enable-chunked-prefill
--no-enable-prefix-caching --no-async-scheduling
--disable-log-requests --disable-log-stats
--no-enable-log-requests
--enable-auto-tool-choice --tool-call-parser hermes
--reasoning-parser deepseek_r1 --enable-reasoning
--served-model-name gpt2 my-model
--chat-template "{{messages[0]['content']}}" --response-role assistant
--max-num-seqs 16 --max-num-batched-tokens 512 --scheduling-policy priority
--kv-cache-dtype auto --block-size 16 --swap-space 4 --cpu-offload-gb 0
--load-format safetensors --seed 0 --enforce-eager
--distributed-executor-backend mp
--generation-config vllm --override-generation-config '{"temperature": 0.5}'
--uvicorn-log-level warning --disable-uvicorn-access-log --allowed-origins '["*"]'
--enable-server-load-tracking --enable-request-id-headers --root-path /x
--speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
--task generate
--runner generate --hf-overrides '{}'
--guided-decoding-backend auto --use-v2-block-manager --num-scheduler-steps 8
--max-seq-len-to-capture 8192 --cuda-graph-sizes 1 2 4
--cudagraph-capture-sizes 1 2 4 --preemption-mode recompute
--max-num-partial-prefills 1 --long-prefill-token-threshold 100
--enable-lora --max-loras 4 --max-lora-rank 16
--enable-log-requests --max-log-len 100 --enable-prompt-tokens-details
--api-server-count 1 --return-tokens-as-token-ids --stream-interval 5
""".strip().splitlines()
REFUSED = {
    "--rope-theta 10000": "config.json says how positions are rotated",
    '--rope-scaling \'{"type": "dynamic", "factor": 2.0}\'': "config.json says how positions are rotated",
    "--disable-frontend-multiprocessing": "--in-process",
    "--tool-call-parser llama4 --enable-auto-tool-choice": "there are hermes",
    "--reasoning-parser kimi": "there are",
    "--kv-cache-dtype nvfp4": "the KV cache has the number format of dtype",
    "--quantization fp8": "int8",
    "--speculative-model gpt2": "--speculative-config",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--revision v1.0": "does not come from the hub",
    "--distributed-executor-backend ray": "needs Ray, which is not installed",
}
"""What a server does not do -> what the refusal names."""


@pytest.mark.parametrize("line", STARTS)
def test_it_starts(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that does nothing here is named once, with the reason."""
    assert main(["serve", "gpt2-tiny", *shlex.split(line), "--dry-run"]) == 0
    said = capsys.readouterr().err
    warned = [text for text in said.splitlines() if text.startswith("stages: warning: ")]
    assert len(warned) == len(set(warned)) and "Traceback" not in said
    assert all(" is ignored: " in text for text in warned)


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_with_the_reason(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if line == "--distributed-executor-backend ray" and is_there("ray"):
        pytest.skip("Ray is installed")
    assert main(["serve", "gpt2-tiny", *shlex.split(line), "--dry-run"]) == 2
    assert REFUSED[line] in capsys.readouterr().err


def test_what_is_ignored_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "gpt2-tiny", "--cudagraph-capture-sizes", "8", "--max-logprobs", "100", "--dry-run"]) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("stages: warning: --cudagraph-capture-sizes is ignored: sizes of CUDA graphs are keys of")
    assert second == "stages: warning: --max-logprobs is ignored: a request gets at most 20 logprobs"


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2"])
def test_both_names_of_gpt2_are_known_without_files(name: str) -> None:
    assert main(["serve", name, "--load-format", "dummy", "--dry-run"]) == 0
