"""Flags of vLLM that are not built here: each is refused with its reason, and accepted at the value that asks for
nothing (vllm/engine/arg_utils.py has them all).

A table maps the reason to the flags. `--x` is a switch that is harmless when it is off, `+--x` one when it is on, and
`--x*` both ways. `--x=1` takes a value, of which 1 is harmless, and `--x=` one of which none but the empty one is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stage03_engine.errors import ConfigError

_WORD = re.compile(r"(\+?)((?:-{1,2}[\w-]+,)*--[\w-]+)(\*|=(.*))?")

ENGINE_FLAGS: dict[str, str] = {
    "no model here brings its own code": "--trust-remote-code* --model-impl=auto --model-class-overrides={}",
    "the model is a folder or a name in the Hugging Face cache (HF_HOME, HF_TOKEN)": """
        --revision= --code-revision= --tokenizer-revision= --hf-config-path= --config-format=auto --hf-token=
        --hf-overrides={} --download-dir= --ignore-patterns=original/**/* --tokenizer-mode=auto
        --skip-tokenizer-init""",
    "weights are read from safetensors, once, in one way": """
        --safetensors-load-strategy= --safetensors-prefetch-num-threads=8
        --safetensors-prefetch-block-size=16777216 --model-loader-extra-config={} --use-tqdm-on-load*
        --pt-load-map-location=cpu --max-parallel-loading-workers= --weight-transfer-config= --enable-sleep-mode
        --sleep-mode-backend=cumem --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=
        --enable-cumem-allocator""",
    "weights and KV cache have one of the dtypes of --dtype; quantization is not built": """
        -q,--quantization= --quantization-config= --allow-deprecated-quantization --kv-cache-dtype=auto
        --kv-cache-dtype-skip-layers= --enable-mamba-cache-stochastic-rounding""",
    "LoRA adapters are not built": """
        --enable-lora --max-loras=1 --max-lora-rank=16 --lora-dtype=auto --enable-tower-connector-lora
        --max-cpu-loras= --fully-sharded-loras --lora-target-modules= --default-mm-loras= --specialize-active-lora
        --enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels=""",
    "the models take no images and videos, and sound in one way only": """
        --allowed-local-media-path= --allowed-media-domains= --language-model-only* --limit-mm-per-prompt={}
        --enable-mm-embeds --media-io-kwargs={} --mm-processor-kwargs= --mm-processor-cache-gb=4
        --mm-processor-cache-type=lru --mm-hasher-algorithm=blake3 --mm-shm-cache-max-object-size-mb=128
        --mm-encoder-only --mm-encoder-tp-mode=weights --mm-encoder-attn-backend= --mm-encoder-attn-dtype=
        --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin=1.5
        --interleave-mm-strings --skip-mm-profiling* --video-pruning-rate= --video-pruning-method=evs
        --mm-tensor-ipc=direct_rpc --mm-processor-device=auto --mm-ipc-gpu-memory-gb=0 --mm-device-do-normalize
        --disable-chunked-mm-input --io-processor-plugin= --ec-transfer-config= --ec-manager-config=
        --engram-config=""",
    "prompts are text or token ids, not embeddings": "--enable-prompt-embeds",
    "there is one engine, in one process, on one device": """
        --distributed-executor-backend=uni --master-addr=127.0.0.1 --master-port=29501 -n,--nnodes=1
        -r,--node-rank=0 --distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --numa-bind
        --numa-bind-nodes= --numa-bind-cpus= --device-ids= -dcp,--decode-context-parallel-size=1
        --dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size=1 --cp-kv-cache-interleave-size=
        -pcp,--prefill-context-parallel-size=1 -dpn,--data-parallel-rank= -dpr,--data-parallel-start-rank=
        -dpl,--data-parallel-size-local=1 -dpa,--data-parallel-address= -dpp,--data-parallel-rpc-port=
        -dpb,--data-parallel-backend=mp -dph,--data-parallel-hybrid-lb -dpe,--data-parallel-external-lb
        -dpm,--data-parallel-multi-port-external-lb --enable-hc-sp --enable-batch-sharded-sampling
        --enable-shm-tensor-arena --dp-sync-interval=16 --disable-nccl-for-dp-synchronization*
        --enable-nccl-comm-suspend --ray-workers-use-nsight --disable-custom-all-reduce* --worker-cls=auto
        --worker-extension-cls= --enable-fault-tolerance --fault-tolerance-config= --aggregate-engine-logging*
        --renderer-num-workers=1 --watchdog-config=""",
    "no model here has experts": """
        -ep,--enable-expert-parallel --enable-ep-weight-filter --all2all-backend=allgather_reducescatter
        --enable-dbo --ubatch-size=0 --enable-elastic-ep --elastic-ep-max-dp-size= --dbo-decode-token-threshold=32
        --dbo-prefill-token-threshold=512 --enable-eplb --eplb-config= --expert-placement-strategy=linear
        --moe-backend=auto --enable-return-routed-experts --aux-output-config=""",
    "no model here has state-space layers": """
        --mamba-backend=triton --mamba-ssu-algorithm= --mamba-cache-philox-rounds=0 --mamba-cache-dtype=auto
        --mamba-ssm-cache-dtype=auto --mamba-block-size= --mamba-cache-mode=
        --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len=16 --use-replayssm
        --disable-hybrid-kv-cache-manager* --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend=""",
    "attention is what the model's config.json says": """
        --disable-sliding-window --kv-sharing-fast-prefill +--swa-bounded-replay --prefix-match-unit=""",
    "the KV cache lives in one engine (--swap-space moves preempted requests out of it)": """
        --prefix-caching-hash-algo=sha256 --prefix-cache-retention-interval=0 --kv-offloading-size=
        --kv-offloading-backend=native --offload-backend=auto --cpu-offload-gb=0 --cpu-offload-params=
        --offload-group-size=0 --offload-num-in-group=1 --offload-prefetch-step=1 --offload-params=
        --kv-transfer-config= --kv-events-config=""",
    "see --max-num-seqs and --max-num-batched-tokens for a step, --max-queue-len for the queue": """
        --max-num-scheduled-tokens= --max-num-active-seqs= --max-num-queued-reqs= --max-num-queued-tokens=
        --long-prefill-token-threshold-adaptive +--scheduler-reserve-full-isl --watermark=0.0
        --prefill-schedule-interval=1 --async-scheduling -dc,--diffusion-config= -O,--optimization-level=2
        --performance-mode=balanced""",
    "kernels are chosen by --attention-backend, and CUDA graphs by --enforce-eager": """
        --disable-cascade-attn* --cudagraph-capture-sizes= --max-cudagraph-capture-size= --ir-op-priority=
        --enable-flashinfer-autotune --monokernel --linear-backend=auto --sparse-indexer-topk-backend=auto
        -cc,--compilation-config={} -ac,--attention-config={} --kernel-config={} --jit-monitor-mode=warn
        --jit-monitor-verbose --additional-config={}""",
    "logprobs are those of the model, at most 20 of them, and noise is drawn in one way": """
        --max-logprobs=20 --logprobs-mode=raw_logprobs --return-sampling-mask --use-fp64-gumbel
        --watermark-config=""",
    "speculative decoding is set up by --speculative-config": "--spec-method= --spec-model= --spec-tokens=",
    "the grammar's settings are flags of their own, such as --disable-any-whitespace": """
        --structured-outputs-config={} --reasoning-config=""",
    "profiles are what --profiler-dir writes": "--profiler-config={} --enable-layerwise-nvtx-tracing",
    "recordings are what --trace writes, and `stages trace export` turns them into other forms": """
        --otlp-traces-endpoint= --collect-detailed-traces= --enable-trace-replay""",
    "metrics are those of /metrics, and logging is set up by --log-config-file": """
        --show-hidden-metrics-for-version= --per-request-spec-decode-metrics=none --kv-cache-metrics
        --kv-cache-metrics-sample=0.01 --custom-histogram-buckets= --cudagraph-metrics --enable-mfu-metrics
        --enable-logging-iteration-details --logging-config= --log-level=INFO --fail-on-environ-validation""",
}
"""Those of the engine, in all commands that start one."""


class _NotBuilt(argparse.Action):
    """Raises ConfigError for any value but the harmless one. Leaves no trace in the namespace."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, reason: str, harmless: Mapping[str, bool] | str
    ) -> None:
        nargs = None if isinstance(harmless, str) else 0
        super().__init__(option_strings, dest, nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._reason, self._harmless = reason, harmless

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = option_string or ""
        accepted = _same(values, self._harmless) if isinstance(self._harmless, str) else self._harmless[flag]
        if not accepted:
            raise ConfigError(_refusal(flag, self._harmless, self._reason))


def _refusal(flag: str, harmless: Mapping[str, bool] | str, reason: str) -> str:
    but = f" (only {harmless} is)" if harmless and isinstance(harmless, str) else ""
    return f"{flag} is not supported{but}: {reason}"


def _same(value: str, harmless: str) -> bool:
    try:
        return float(value) == float(harmless)
    except ValueError:
        return value.strip().lower() == harmless.lower()


def _opposite(flag: str) -> str:
    """`--disable-x` for `--enable-x` and the other way round, else `--no-x`."""
    for word, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(word):
            return other + flag.removeprefix(word)
    return "--no-" + flag.removeprefix("--")


def _read(table: Mapping[str, str]) -> Iterator[tuple[list[str], Mapping[str, bool] | str, str]]:
    """(all names of a flag, the value that is harmless or which of the names are, the reason)"""
    for reason, words in table.items():
        for word in words.split():
            on, names, kind, value = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
            flags = names.split(",")
            harmless: Mapping[str, bool] | str = value
            if value is None:
                switched = dict.fromkeys(flags, bool(on or kind)) | {_opposite(flags[-1]): not on or bool(kind)}
                harmless, flags = switched, list(switched)
            yield flags, harmless, reason


def add_not_built(parser: argparse.ArgumentParser, table: Mapping[str, str]) -> None:
    """Make the flags of a table known to `parser`, outside its `--help`."""
    for flags, harmless, reason in _read(table):
        parser.add_argument(*flags, action=_NotBuilt, reason=reason, harmless=harmless, dest=argparse.SUPPRESS)


def accepts_key(table: Mapping[str, str], name: str, value: object) -> bool:
    """Is `name: value` of a config file a flag of the table? `name` is written with underscores; a switch is true or false.

    Raises ConfigError when the value asks for something.
    """
    flag = "--" + name.replace("_", "-")
    for flags, harmless, reason in _read(table):
        if flag not in flags:
            continue
        if isinstance(harmless, str):
            accepted = value is None or _same(value if isinstance(value, str) else json.dumps(value), harmless)
        else:
            off = not harmless[flag] or all(harmless.values())
            accepted = value is None or (off if value is False else value is True and harmless[flag])
        if not accepted:
            raise ConfigError(_refusal(flag, harmless, reason))
        return True
    return False
