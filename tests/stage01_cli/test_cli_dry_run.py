"""`serve --dry-run`: the memory that a start would take, and what a start would refuse."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stage01_cli.main import main
from stage02_server.features.dry_run.memory import count_parameters, estimate_memory, shown as readable
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.rank_config import rank_config
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import cut_vocabulary
from stage03_engine.core.features.distributed.stages import leave_out
from stage03_engine.core.features.quantization.size import quantized_bytes
from stage03_engine.core.kv_cache_size import item_bytes, kv_block_bytes
from stage03_engine.core.models.registry import model_class

BUNDLED = Path(__file__).parent.parent.parent / "stage03_engine/bundled/gpt2-tiny"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "config",
    ["gpt2-tiny", "gpt2", "gpt2-medium", LLAMA, LLAMA | {"attention_bias": True, "tie_word_embeddings": True}, QWEN],
    ids=lambda config: config if isinstance(config, str) else config["model_type"],
)
def test_the_weights_are_counted_as_the_engine_has_them(config: str | dict[str, object], tmp_path: Path) -> None:
    """From a file's head, or from the shape alone."""
    model, settings = config, {"load_format": "auto" if config == "gpt2-tiny" else "dummy"}
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
        model = str(tmp_path)
    made = EngineArgs.from_kwargs(model=model, device="cpu", **settings)
    with torch.device("meta"):
        real = model_class(made.shape.architecture)(made.shape, "torch")
    assert count_parameters(made) == sum(parameter.numel() for parameter in real.parameters())


def test_masks_in_a_checkpoint_are_no_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((BUNDLED / file).read_bytes())
    tensors = load_file(BUNDLED / "model.safetensors")
    mask = next(name for name in tensors if name.endswith("attn.c_attn.bias")).replace("c_attn.", "")
    save_file(tensors | {mask: torch.ones(1, 1, 512, 512)}, tmp_path / "model.safetensors")
    both = [EngineArgs.from_kwargs(model=model) for model in (str(tmp_path), "gpt2-tiny")]
    assert count_parameters(both[0]) == count_parameters(both[1])
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert main(["serve", str(tmp_path), "--dry-run"]) == 2


def test_the_sum_is_of_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", max_num_seqs=3, block_size=100, dtype="bfloat16")
    memory = estimate_memory(config)
    assert memory.per_request == 6 * kv_block_bytes(config)  # 512 tokens are 5.12 blocks
    assert memory.per_token == 2 * 6 * 256 * 2 and memory.weights == 2 * memory.num_parameters
    assert memory.sum == memory.weights + 3 * memory.per_request + memory.activations and memory.activations > 0
    assert main(["serve", "gpt2-tiny", "--dry-run", "--max-num-seqs", "3"]) == 0
    shown = capsys.readouterr().out.partition("\nMemory\n")[2].split()
    names = (
        "weights",
        "kv_cache_per_token",
        "kv_cache_per_request",
        "kv_cache_for_all",
        "activations",
        "sum",
        "available",
    )
    assert set(names) <= set(shown)


FORMS = [
    "-tp 2",
    "-pp 2",
    "-tp 2 -pp 3",
    "-tp 2 -pp 2 -q int8",
    "-tp 2 -q int4",
    "-tp 4 --dtype bfloat16",
    "llama -tp 4 -pp 2",
]


@pytest.mark.parametrize("words", FORMS)
def test_one_worker_of_several_beside_the_whole(words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a worker of each stage really has: its model without values, on torch's device meta."""
    flags = words.removeprefix("llama ").split()
    model = "gpt2-tiny"
    if words.startswith("llama"):
        model = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        flags += ["--load-format", "dummy"]
    assert main(["serve", model, "--dry-run", *flags]) == 0
    lines = capsys.readouterr().out.partition("\nMemory\n")[2].splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:3]) for line in lines}
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    tp, pp = int(given.get("-tp", 1)), int(given.get("-pp", 1))
    dtype, format_ = given.get("--dtype", "auto"), given.get("--load-format", "auto")
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = EngineArgs.from_kwargs(
        model=model, load_format=format_, dtype=dtype, quantization=given.get("-q"), **sizes
    )
    for stage in range(pp):
        own = Ranks(stage * tp, tp, pp)
        mine = rank_config(config, own)
        size, rows = size_of_part(config, mine, own)
        if "-q" in given:
            size += quantized_bytes(replace(mine.shape, vocab_size=rows if own.is_last_stage else 0), 4, given["-q"])
        assert shown[f"{own.lane}_weights"] == readable(size)
        assert shown[f"{own.lane}_kv_per_token"] == readable(kv_block_bytes(mine) // 16)


def size_of_part(config: VllmConfig, mine: VllmConfig, own: Ranks) -> tuple[int, int]:
    """(bytes, rows of the vocabulary) of a worker's model."""
    with torch.device("meta"):
        model = model_class(mine.shape.architecture)(mine.shape, "torch")
    cut_vocabulary(model, config.shape, own)
    leave_out(model, config.shape, own)
    count = sum(parameter.numel() for parameter in model.parameters())
    return count * item_bytes(config), -(-config.shape.vocab_size // own.tp_size)


PLACES = [
    "gpt2-tiny", "gpt2-tiny --max-loras 3 --max-lora-rank 5", "gpt2-tiny --max-cpu-loras 7 --lora-dtype bfloat16", "llama --max-loras 2",
    "gpt2-tiny -tp 2 --max-loras 2", "llama -tp 2", "qwen --dtype bfloat16", "llama -tp 2 --lora-dtype float16",
]  # fmt: skip


@pytest.mark.parametrize("words", PLACES)
def test_adapters_are_counted_as_the_engine_has_them(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The tensors of all places that the runner makes, on torch's device meta; and an adapter of the highest rank for every layer."""
    from stage03_engine.core.features.lora.places import LowRankSum, Rows
    from stage03_engine.core.features.lora.slices import linear_layers
    from stage04_kernels.features.lora import low_rank_kernel

    model, *flags = words.split()
    if model in ("llama", "qwen"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA if model == "llama" else QWEN))
        model, flags = str(tmp_path), [*flags, "--load-format", "dummy"]
    assert main(["serve", model, "--dry-run", "--device", "cpu", *flags]) == 0
    plain = _memory(capsys)
    assert not [name for name in plain if "adapter" in name], "it is off"
    assert main(["serve", model, "--dry-run", "--device", "cpu", "--enable-lora", *flags]) == 0
    shown = _memory(capsys)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    tp, places = int(given.get("-tp", 1)), int(given.get("--max-loras", 1))
    cached, rank = int(given.get("--max-cpu-loras", places)), int(given.get("--max-lora-rank", 16))
    config = EngineArgs.from_kwargs(
        model=model, load_format=given.get("--load-format", "auto"), dtype=given.get("--dtype", "auto"), tensor_parallel_size=tp, device="cpu"
    )  # fmt: skip
    name = given.get("--lora-dtype", config.model_config.dtype)

    def sizes(of: VllmConfig) -> tuple[int, int]:
        with torch.device("meta"):
            made = model_class(of.shape.architecture)(of.shape, "torch")
        options = {"dtype": getattr(torch, name), "device": "meta"}
        alone = replace(of.shape, part_of=None) if hasattr(of.shape, "part_of") else of.shape
        layers = linear_layers(made, alone).values()
        sums = [LowRankSum(each, Rows(), (places, rank), options, low_rank_kernel("torch")) for each in layers]
        held = sum(each.a.nbytes + each.b.nbytes for each in sums)
        return held, held // places * cached

    whole = sizes(config)
    assert (shown["adapter_places"], shown["adapter_cache"]) == tuple(map(readable, whole))
    if tp == 2:
        own = Ranks(0, 2, 1)
        part = sizes(rank_config(config, own))
        assert (shown[f"{own.lane}_adapter_places"], shown[f"{own.lane}_adapter_cache"]) == tuple(map(readable, part))
    args = EngineArgs.from_kwargs(
        model=model, load_format=given.get("--load-format", "auto"), dtype=given.get("--dtype", "auto"), tensor_parallel_size=tp, device="cpu",
        enable_lora=True, max_loras=places, max_cpu_loras=cached, max_lora_rank=rank, lora_dtype=given.get("--lora-dtype", "auto"),
    )  # fmt: skip
    assert estimate_memory(args).sum - estimate_memory(config).sum == sum(whole)


def _memory(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Name -> size, of the plan."""
    lines = capsys.readouterr().out.partition("\nMemory\n")[2].splitlines()
    return {line.split()[0]: " ".join(line.split()[1:3]) for line in lines}


def test_what_an_adapter_really_takes() -> None:
    """The bundled one, in an engine: its part of the cache is its file's rank, and the places do not depend on it."""
    from stage03_engine.core.engine_core_proc import make_core
    from stage03_engine.core.features.lora.size import pair_lengths

    settings = {"enable_lora": True, "lora_modules": ("gpt2-tiny-ship",), "max_loras": 2, "max_model_len": 64}
    config = EngineArgs.from_kwargs(model="gpt2-tiny", kv_cache_memory_bytes=20_000_000, device="cpu", **settings)
    core: Any = make_core(config)
    try:
        [hook] = [hook for hook in core.executor.worker.model_runner.hooks if hasattr(hook, "adapters")]
        held = sum(each.a.nbytes + each.b.nbytes for each in hook.adapters._sums.values())
        [adapter] = hook.adapters.cached.values()
        of_a_rank = pair_lengths(config.shape) * item_bytes(config)
        assert held == of_a_rank * 16 * 2 and adapter.num_bytes == of_a_rank * adapter.rank
    finally:
        core.shutdown()


MORE_THAN_THERE_IS = 2 * psutil.virtual_memory().total
"""Bytes that the system gives in several pieces, and does not have."""
REFUSED = {
    "--device cuda": "there is no usable GPU",
    "--num-gpu-blocks-override 5": "one request may need 512",
    "--kv-cache-memory-bytes 100k": "one request may need 512",
    "--device cpu --kv-cache-memory-bytes 1000000G": "not enough memory for",
    f"--device cpu --kv-cache-memory-bytes {MORE_THAN_THERE_IS}": "not enough memory for",
    "--device cpu --num-gpu-blocks-override 9000000000": "not enough memory for",
    "--gpu-memory-utilization 0.0001": "one request may need 512",
    "--scheduler-cls no.such:Scheduler": "--scheduler-cls no.such:Scheduler",
    "--block-pool-cls no.such:Pool": "--block-pool-cls no.such:Pool",
    "--scheduler-cls json:JSONDecoder": "--scheduler-cls json:JSONDecoder: TypeError",
    "--preemption-mode swap --swap-space 100000": "not enough memory for 100000",
    "--attention-backend no.such:attention": "no.such",
    "--attention-backend :attention": "attention backend :attention cannot be loaded",
    "--chat-template /no/such.jinja": "cannot read the chat template",
    "--middleware no.such.Layer": "--middleware no.such.Layer",
    "--middleware json.JSONDecoder": "--middleware json.JSONDecoder: TypeError",
    "--logits-processors json:JSONDecoder no.such:Processor": "--logits-processors no.such:Processor: there is no module",
    "--uds /no/such/socket": "cannot listen on /no/such/socket",
    "--tool-call-parser nobody --enable-auto-tool-choice": "'nobody' is not known",
    "--profiler-dir /etc/passwd": "cannot write profiles to '/etc/passwd': File exists; see --profiler-dir",
    "--profiler-dir /etc/passwd/a/b": "cannot write profiles to '/etc/passwd/a/b': Not a directory; see --profiler-dir",
    "--log-config-file /no/such.json": "cannot read log_config_file",
    "-dp=2 --in-process": "--in-process has one engine",
    "-dp=2 --engine=echo": "--engine echo has one engine",
    "-dp=2 --data-parallel-rank=1 -asc=2": "data_parallel_rank needs api_server_count 1, not 2",
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items())
def test_what_a_start_refuses_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert main(["serve", "gpt2-tiny", "--dry-run", *words.split()]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(BUNDLED / file)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--dry-run"]) == 2
    assert "cannot read the tokenizer" in capsys.readouterr().err


def test_a_chat_template_of_the_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(BUNDLED / file)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for m in %}"}))
    assert main(["serve", str(tmp_path), "--dry-run"]) == 2
    assert "not valid Jinja" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    import subprocess

    code = "import sys; from stage01_cli.main import main; main(['serve', 'gpt2-tiny', '--dry-run']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
