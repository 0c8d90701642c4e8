"""Adapters: the tokens of each request are those of the model that its adapter was merged into, whatever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from small_adapters import merge, write_adapter
from small_gpt2 import first_layers
from transformers import LlamaConfig, LlamaForCausalLM

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1, "rank": 4, "alpha": 8.0},
    "attention": {"seed": 2, "rank": 16, "alpha": 4.0, "only": "attn", "use_rslora": True},
    "last": {"seed": 3, "rank": 1, "alpha": 1.0, "only": "1.mlp", "strength": 1.0},
}
PROMPTS = [list(range(5, 45)), list(range(5, 38)), [7], list(range(60, 64))]


@dataclass
class Family:
    """A model, its adapters, and what each answers alone when it is merged: (adapter, prompt) -> tokens."""

    model: Path
    modules: tuple[str, ...]
    expected: dict[tuple[str | None, int], list[int]]


def tokens_of(llm: LLM, asked: list[tuple[str | None, int]], **how: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, lora=name, **how) for name, _ in asked]
    outputs = llm.generate([PROMPTS[number] for _, number in asked], params)  # type: ignore[arg-type]
    return [list(output.outputs[0].token_ids) for output in outputs]


def gpt2(folder: Path) -> Path:
    return Path(first_layers(folder, 2))


def llama(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED_FOLDER / "gpt2-tiny" / name).read_bytes())
    return folder


@pytest.fixture(scope="module", params=[gpt2, llama], ids=["gpt2", "llama"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    base = tmp_path_factory.mktemp("family")
    make: Callable[[Path], Path] = request.param
    model = make(base / "model")
    folders = {name: Path(write_adapter(base / name, model, **how)) for name, how in ADAPTERS.items()}
    expected = {}
    for name in (None, *ADAPTERS):
        merged = model if name is None else merge(base / f"merged {name}", model, folders[name])
        with LLM(str(merged), linear_backend="torch", **SMALL) as llm:
            for number in range(len(PROMPTS)):
                expected[name, number] = tokens_of(llm, [(None, number)])[0]
    assert len({str(tokens) for (_, number), tokens in expected.items() if number == 0}) == 4, "they make no difference"
    return Family(model, tuple(f"{name}={folder}" for name, folder in folders.items()), expected)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"linear_backend": "auto"},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"num_gpu_blocks_override": 14, "block_size": 8},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "ahead": {"async_scheduling": True},
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def llm(request: pytest.FixtureRequest, family: Family) -> Iterator[LLM]:
    how: dict[str, Any] = SMALL | {"linear_backend": "torch"} | CONFIGURATIONS[request.param]
    with LLM(str(family.model), enable_lora=True, max_loras=3, lora_modules=family.modules, **how) as llm:
        yield llm


asked = st.lists(
    st.tuples(st.sampled_from([None, *ADAPTERS]), st.integers(0, len(PROMPTS) - 1)), min_size=1, max_size=8
)  # fmt: skip


@pytest.mark.slow(keep=("preempted-gpt2", "plain-llama", "packed-llama"))
@settings(max_examples=8)
@given(asked)
def test_each_request_of_a_mix_gets_the_tokens_of_its_merged_model(
    llm: LLM, family: Family, mix: list[tuple[str | None, int]]
) -> None:
    """Also because the blocks of equal prompts are found again with the same adapter only."""
    assert tokens_of(llm, mix) == [family.expected[each] for each in mix]


@pytest.mark.slow(keep="llama-int8")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantized_weights_and_an_adapter(family: Family, method: str) -> None:
    """What the adapter adds is not quantized, and comes before the activation."""
    how = SMALL | {"quantization": method, "linear_backend": "torch"}
    with LLM(str(family.model), enable_lora=True, max_loras=3, lora_modules=family.modules, **how) as llm:
        together = tokens_of(llm, [("all", 0), (None, 0), ("attention", 0)])
        assert together == [tokens_of(llm, [(name, 0)])[0] for name in ("all", None, "attention")]
        assert together[0] != together[1]
        if method == "int8":
            assert together[0][:4] == family.expected["all", 0][:4]


def test_the_trace_says_what_was_loaded_and_which_rows_it_got(family: Family, tmp_path: Path) -> None:
    how: dict[str, Any] = SMALL | {"trace": str(tmp_path / "trace"), "max_loras": 2}
    with LLM(str(family.model), enable_lora=True, lora_modules=family.modules, **how) as llm:
        tokens_of(llm, [("all", 0), (None, 1), ("last", 2)])
    run = read_run(tmp_path / "trace")
    loaded = {event.args["adapter"]: event.args for event in run.named("lora.loaded")}
    assert loaded.keys() == ADAPTERS.keys() and loaded["attention"]["rank"] == 16 and loaded["last"]["bytes"] > 0
    assert run.named("lora.rows")[0].args["rows"] == {"all": len(PROMPTS[0]), "last": len(PROMPTS[2])}


# What is refused


def broken(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Changes the configuration or the tensors of an adapter."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        change(config, tensors)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


FIRST = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "cannot read .*adapter_config.json"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "no object": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "peft_type must be LORA"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot read .*adapter_model"),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x00" * 20), "cannot read"),
    "no pairs": (broken(lambda config, tensors: tensors.clear()), "holds no pairs"),
    "another method": (broken(lambda config, tensors: config.update(peft_type="IA3")), "peft_type must be LORA"),
    "rank": (broken(lambda config, tensors: config.update(r=17)), "rank 17 is more than max_lora_rank 16"),
    "rank 0": (broken(lambda config, tensors: config.update(r=0)), "r must be an integer of at least 1"),
    "no alpha": (broken(lambda config, tensors: config.pop("lora_alpha")), "lora_alpha must be a number"),
    "alpha": (broken(lambda config, tensors: config.update(lora_alpha=float("nan"))), "lora_alpha must be a number"),
    "large": (broken(lambda config, tensors: config.update(lora_alpha=10**400)), "lora_alpha must be a number"),
    "true": (broken(lambda config, tensors: config.update(lora_alpha=True)), "lora_alpha must be a number"),
    "DoRA": (broken(lambda config, tensors: config.update(use_dora=True)), "use_dora 'True' is not built"),
    "bias": (broken(lambda config, tensors: config.update(bias="all")), "bias 'all' is not built"),
    "ranks": (broken(lambda config, tensors: config.update(rank_pattern={"x": 1})), "rank_pattern .* is not built"),
    "half": (broken(lambda config, tensors: tensors.pop(FIRST)), "lora_A of h.0.attn.c_attn is missing"),
    "shape": (broken(lambda config, tensors: tensors.update({FIRST: torch.ones(4, 3)})), r"shape \[4, 3\], and the model needs"),
    "numbers": (broken(lambda config, tensors: tensors.update({FIRST: torch.ones(4, 256).int()})), "holds torch.int32"),
    "NaN": (broken(lambda config, tensors: tensors[FIRST].fill_(torch.nan)), "NaN or infinity"),
    "another tensor": (broken(lambda config, tensors: tensors.update(x=torch.ones(1))), "belongs to no pair: x"),
    "a layer": (
        broken(lambda config, tensors: (config.update(target_modules=["c_attn"]), [tensors.pop(FIRST.replace("h.0", "h.1").replace("_A", part)) for part in ("_A", "_B")])),
        "lora_A and lora_B of h.1.attn.c_attn are missing",
    ),
    "another base": (
        broken(lambda config, tensors: (config.update(base_model_name_or_path="other"), tensors.update({FIRST: torch.ones(4, 3)}))),
        r"shape \[4, 3\], and the model needs \[4, 256\] \(it says that it was made for 'other'\)",
    ),
    "another layer": (
        broken(lambda config, tensors: tensors.update({FIRST.replace("h.0", "h.9"): torch.ones(4, 256)})),
        "the model has no linear layer h.9.attn.c_attn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_adapter_that_is_broken_or_belongs_to_another_model(name: str, tmp_path: Path) -> None:
    spoil, says = BROKEN[name]
    folder = Path(write_adapter(tmp_path / "adapter", BUNDLED_FOLDER / "gpt2-tiny", seed=1))
    spoil(folder)
    with pytest.raises(ConfigError, match=f"adapter mine: .*{says}"):
        LLM("gpt2-tiny", enable_lora=True, lora_modules=(f"mine={folder}",), **SMALL)


@pytest.mark.parametrize(
    ("given_settings", "says"),
    [
        ({"lora_modules": ("a=b",)}, "lora_modules needs enable_lora"),
        ({"enable_lora": True, "lora_modules": ("ab",)}, "'ab' is not name=folder"),
        ({"enable_lora": True, "lora_modules": ("a=",)}, "'a=' is not name=folder"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "'a' comes twice"),
        ({"enable_lora": True, "lora_modules": ("{",)}, "is not valid JSON"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a", "pth": "b"}',)}, "unknown key 'pth'"),
        ({"enable_lora": True, "lora_modules": ('{"name": null, "path": "b"}',)}, "name must be a text, not null"),
        ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        (
            {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2},
            "max_cpu_loras 2 must be at least max_loras, which is 3",
        ),
        ({"enable_lora": True, "lora_dtype": "float64"}, "'float64' is not one of auto, float16"),
    ],
)
def test_settings_that_are_refused(given_settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs.from_kwargs(model="gpt2-tiny", **given_settings)


def test_a_request_that_names_no_adapter_of_this_engine() -> None:
    with LLM("gpt2-tiny", **SMALL) as plain, pytest.raises(InvalidRequestError, match="no adapter 'x'; there are none"):
        plain.generate("a", SamplingParams(lora="x"))


def test_an_adapter_that_does_not_fit_the_number_format(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", BUNDLED_FOLDER / "gpt2-tiny", seed=1, alpha=900_000.0)
    with pytest.raises(
        ConfigError, match="adapter mine: scale times lora_B of .* in torch.float16, holds NaN or infinity"
    ):
        LLM("gpt2-tiny", enable_lora=True, lora_modules=(f"mine={folder}",), **SMALL | {"dtype": "float16"})
