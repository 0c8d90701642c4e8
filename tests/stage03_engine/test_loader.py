"""Weights: straight from the file, no second copy, and every mismatch named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stage03_engine.bundled
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

BUNDLED = Path(stage03_engine.bundled.__file__).parent / "gpt2-tiny"
CPU = torch.device("cpu")


def make_folder(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None) -> Path:
    tensors = load_file(BUNDLED / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


def load(folder: Path) -> torch.nn.Module:
    return get_model(EngineArgs.from_kwargs(model=str(folder)), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("h.3.mlp.c_fc.bias"), r"lacks 1 tensors: h\.3\.mlp\.c_fc\.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "does not know: extra"),
        (lambda t: t.update({"wpe.weight": torch.zeros(4, 256)}), r"wpe\.weight has shape \[4, 256\].*\[512, 256\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Callable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make_folder(tmp_path, change))


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ConfigError, match="cannot read the weights"):
        load(folder)


def test_names_as_transformers_saves_them_are_understood(tmp_path: Path) -> None:
    """With the `transformer.` prefix, the tied output matrix, and the causal masks of old checkpoints."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors["transformer." + name] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 512, 512, dtype=torch.float16)
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4, dtype=torch.float16)

    renamed = dict(load(make_folder(tmp_path, rename)).named_parameters())
    for name, parameter in load(BUNDLED).named_parameters():
        assert torch.equal(parameter, renamed[name]), name


@pytest.mark.slow
def test_weights_in_their_own_format_are_mapped_not_copied(tmp_path: Path) -> None:
    """Loading 200 MB of float32 must not take 200 MB of anonymous memory: the pages stay the file's."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("anonymous memory is read from /proc")
    shape = {"n_layer": 2, "n_embd": 1024, "n_head": 16, "vocab_size": 24000, "n_positions": 512}
    config = json.loads((BUNDLED / "config.json").read_text()) | shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = f"""
        import re, sys, torch
        from pathlib import Path
        from safetensors.torch import save_file
        from stage03_engine.arg_utils import EngineArgs
        from stage03_engine.core.models.loader import get_model
        folder = Path({str(tmp_path)!r})
        anonymous = lambda: 1024 * int(re.search(r"Anonymous: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
        if sys.argv[1] == "make":
            config = EngineArgs.from_kwargs(model=str(folder), load_format="dummy", tokenizer={str(BUNDLED)!r})
            model = get_model(config, torch.float32, torch.device("cpu"))
            save_file({{name: p.data for name, p in model.named_parameters()}}, folder / "model.safetensors")
        else:
            config = EngineArgs.from_kwargs(model=str(folder), tokenizer={str(BUNDLED)!r})
            before = anonymous()
            model = get_model(config, torch.float32, torch.device("cpu"))
            total = sum(float(p.sum()) for p in model.parameters())  # touch every page
            print(anonymous() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run([*command, "make"], check=True)
    size = (tmp_path / "model.safetensors").stat().st_size
    copied = int(subprocess.run([*command, "load"], check=True, capture_output=True, text=True).stdout)
    assert size > 190_000_000
    assert copied < size / 4


@pytest.mark.slow(keep="gpt2-tiny")
@pytest.mark.parametrize(("model", "num_layers"), [("gpt2", 12), ("gpt2-tiny", 6)])
def test_dummy_weights_serve_any_known_shape_and_depend_on_the_seed(model: str, num_layers: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)

    def answer(seed: int) -> list[int]:
        with LLM(model, load_format="dummy", seed=seed, kv_cache_memory_bytes=100_000_000) as llm:
            assert llm.vllm_config.shape.num_layers == num_layers
            return llm.generate("Hello", params)[0].outputs[0].token_ids

    assert answer(1) == answer(1) != answer(2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    with LLM("gpt2-tiny", dtype=dtype, kv_cache_memory_bytes=20_000_000) as llm:
        text = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert text.strip()
