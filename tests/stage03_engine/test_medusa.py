"""Medusa heads: their guesses are those of a plain forward pass, and the tokens are the same as without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafting import COMMON, PARAMS, PROMPTS, ROOMY, SETTINGS, answers, check_the_same, counts_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode.medusa import MedusaHeads, MedusaHook
from stage03_engine.core.features.spec_decode.medusa_config import num_parameters
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

TINY = BUNDLED_FOLDER / "gpt2-tiny"
HEADS, VOCAB = 3, 2048


def plain_hidden(model: Any, token_ids: list[int]) -> Tensor:
    """The slow twin's half: transformers' last hidden states of these tokens, [num_tokens, hidden_size], from one pass without a cache."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([token_ids])).last_hidden_state[0]


def plain_guesses(tensors: dict[str, Tensor], hidden: Tensor) -> list[int]:
    """And what the heads of a checkpoint say about one of them, written down from the paper: W2 (h + silu(W1 h))."""
    found = []
    for head in range(HEADS):
        x, layer = hidden, 0
        while (name := f"blocks.{head}.layers.{layer}") + ".weight" in tensors:
            x = x + F.silu(F.linear(x, tensors[name + ".weight"], tensors.get(name + ".bias")))
            layer += 1
        matrix = tensors.get(f"lm_heads.{head}.weight", tensors["lm_heads.0.weight"])
        found.append(int((matrix @ x).argmax()))
    return found


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    known = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 256, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(known | {"num_heads": HEADS, "num_hidden_layers": 1} | config))
    return str(folder)


@pytest.fixture(scope="module")
def plain() -> tuple[list[tuple[Any, ...]], int]:
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        return answers(llm), counts_of(llm)["steps"]


@pytest.fixture(scope="module")
def target() -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(TINY).float().eval()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, plain: tuple[list[Any], int], target: GPT2LMHeadModel) -> str:
    """Heads that are right now and then: random blocks, and output matrices fitted to a part of the plain answers (least squares)."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"blocks.{head}.layers.0.weight": torch.randn(256, 256, generator=generator) * 0.02 for head in range(HEADS)
    }
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        texts = [llm.tokenizer.encode(prompt) + list(answer[0]) for prompt, answer in zip(PROMPTS, plain[0])]
    hidden = [plain_hidden(target, text) for text in texts[::2]]
    for head in range(HEADS):
        states = torch.cat([each[: -head - 2] for each in hidden])
        labels = torch.cat([torch.tensor(text[head + 2 :]) for text in texts[::2]])
        x = states + F.silu(states @ tensors[f"blocks.{head}.layers.0.weight"].T)
        wanted = F.one_hot(labels, VOCAB).float()
        gram = x.T @ x + 1.0 * torch.eye(256)
        tensors[f"lm_heads.{head}.weight"] = 20 * torch.linalg.solve(gram, x.T @ wanted).T
    return write(tmp_path_factory.mktemp("heads") / "learned", tensors)


def spec(model: str, count: int = HEADS, **more: Any) -> dict[str, Any]:
    return {"method": "medusa", "model": model, "num_speculative_tokens": count} | more


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_with_and_without(name: str, plain: tuple[list[Any], int], learned: str) -> None:
    check_the_same(name, plain, spec(learned))


def test_several_workers_draft_alike(plain: tuple[list[Any], int], learned: str) -> None:
    """Each has all of the heads, and the whole hidden states."""
    found = []
    for workers in (1, 2):
        settings = COMMON | ROOMY | {"tensor_parallel_size": workers, "speculative_config": spec(learned)}
        with LLM("gpt2-tiny", **settings) as llm:
            # no grammar: when it is ready depends on the clock, and the number of steps on that
            assert answers(llm, PROMPTS[:5], PARAMS[:5]) == plain[0][:5]
            found.append(counts_of(llm))
    assert found[0] == found[1] and found[0]["accepted"] > 0


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_other_ways_to_draft_leave_greedy_tokens_alone(method: str, plain: tuple[list[Any], int], learned: str) -> None:
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(learned, draft_sample_method=method)) as llm:
        found = answers(llm)
        assert counts_of(llm)["accepted"] > 0
    for params, mine, wanted in zip(PARAMS, found, plain[0]):
        assert mine == wanted or (method == "probabilistic" and not params.greedy)


def check_guesses(llm: LLM, model: Any, tensors: dict[str, Tensor], prompts: list[list[int]]) -> int:
    """Whatever is drafted is what the twin says of the tokens that were known then. Returns how many guesses that were."""
    runner = llm.engine_core._core.executor.worker.model_runner
    [hook] = [hook for hook in runner.hooks if isinstance(hook, MedusaHook)]
    drafted, seen = hook.drafted, []

    def spied(scheduled: Any, scheduler_output: Any) -> Any:
        drafts = drafted(scheduled, scheduler_output)
        for request_id, token_ids in drafts.items():
            row = runner.batch.row_of[request_id]
            seen.append((runner.batch.token_ids[row, : runner.batch.num_tokens[row]].tolist(), list(token_ids)))
        return drafts

    hook.drafted = spied
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for known, token_ids in seen:
        wanted = plain_guesses(tensors, plain_hidden(model, known)[-2])  # the last one is not computed yet
        assert token_ids == wanted[: len(token_ids)], known
    return sum(len(token_ids) for _, token_ids in seen)


@pytest.mark.parametrize("name", ["roomy", "small chunks", "preemption, small chunks", "preemption, swap"])
def test_the_guesses_are_those_of_a_plain_pass(name: str, target: GPT2LMHeadModel, learned: str) -> None:
    """Whatever happened to the request before: chunks, a shared beginning, drafts that stood and fell, preemption."""
    prompts = [
        [5, 6, 7, 8, 9, 10, 11, 12, 13],
        [5, 6, 7, 8, 9, 10, 11, 12, 14],
        [100],
        *([[200 + n, 3, 4] for n in range(4)]),
    ]
    tensors = load_file(Path(learned) / "model.safetensors")
    with LLM("gpt2-tiny", **COMMON | SETTINGS[name], speculative_config=spec(learned)) as llm:
        assert check_guesses(llm, target, tensors, prompts) > 100
        assert counts_of(llm)["preempted"] > 0 or "preemption" not in name


@torch.inference_mode()
def test_every_form_of_a_checkpoint(tmp_path: Path, target: GPT2LMHeadModel) -> None:
    """Two layers with biases, the makers' names, one output matrix for all heads, and a part of the vocabulary."""
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.05

    blocks = {
        f"blocks.{head}.layers.{layer}.{kind}": random(*size)
        for head in range(HEADS) for layer in range(2) for kind, size in (("weight", (256, 256)), ("bias", (256,)))
    }  # fmt: skip
    kept = torch.randperm(VOCAB, generator=generator)[:500]
    matrix = random(VOCAB, 256)
    only = torch.full((VOCAB, 1), -1e9).index_fill(0, kept, 0.0)
    forms: dict[str, tuple[dict[str, Tensor], dict[str, Any], Tensor | None]] = {
        "one matrix": ({"lm_heads.0.weight": matrix}, {"original_lm_head": True}, None),
        "map, whole matrix": (
            {"lm_heads.0.weight": matrix, "token_map": kept}, {"original_lm_head": True, "truncated_vocab_size": 500}, only,
        ),
        "map, its rows": (
            {f"lm_heads.{head}.weight": matrix[kept] for head in range(HEADS)} | {"token_map": kept}, {"truncated_vocab_size": 500}, only,
        ),
    }  # fmt: skip
    for number, (more, config, mask) in enumerate(forms.values()):
        stored = {
            f"medusa_heads.{name}" if name != "token_map" else name: each for name, each in (blocks | more).items()
        }
        named = {"num_heads": None, "num_hidden_layers": None, "medusa_num_heads": HEADS, "medusa_num_layers": 2}
        folder = write(tmp_path / str(number), stored, **named, medusa_fc_bias=True, **config)
        with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(folder)) as llm:
            runner = llm.engine_core._core.executor.worker.model_runner
            [hook] = [hook for hook in runner.hooks if isinstance(hook, MedusaHook)]
            hidden = plain_hidden(target, [3, 4, 5])
            for head in range(HEADS):
                x = hidden
                for layer in range(2):
                    name = f"blocks.{head}.layers.{layer}"
                    x = x + F.silu(F.linear(x, blocks[name + ".weight"], blocks[name + ".bias"]))
                wanted = x @ matrix.T
                found = hook.heads.compute_logits(hidden, head)
                if mask is not None:
                    assert (found.isinf() == (mask.T < 0).expand_as(found)).all()
                    found, wanted = found[:, kept], wanted[:, kept]
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_heads_of_a_llama(tmp_path: Path) -> None:
    """Any target: the heads see its last hidden state only."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_position_embeddings=128, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    tensors = {f"blocks.{head}.layers.0.weight": torch.randn(48, 48) * 0.1 for head in range(HEADS)}
    tensors |= {f"lm_heads.{head}.weight": torch.randn(VOCAB, 48) for head in range(HEADS)}
    heads = write(tmp_path / "heads", tensors, hidden_size=48)
    settings = COMMON | ROOMY | {"tokenizer": str(TINY)}
    with LLM(
        str(tmp_path / "llama"), **settings, speculative_config=spec(heads, adaptive_num_speculative_tokens=False)
    ) as llm:
        assert check_guesses(llm, model, tensors, [[5, 6, 7], [9]]) > 100


def test_they_take_no_blocks_and_draft_up_to_a_length(learned: str) -> None:
    plain, heads = (
        EngineArgs.from_kwargs(model="gpt2-tiny", **more) for more in ({}, {"speculative_config": spec(learned)})
    )
    assert kv_block_bytes(heads) == kv_block_bytes(plain)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(learned, max_model_len=4)) as llm:
        llm.generate([[5, 6, 7, 8]], params)
        assert counts_of(llm)["drafted"] == 0


def test_random_heads_beside_random_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "heads", {"unused": torch.zeros(1)}, hidden_size=768, vocab_size=50257)
    (tmp_path / "heads" / "model.safetensors").unlink()
    settings = {"load_format": "dummy", "num_gpu_blocks_override": 40, "max_model_len": 32, "tokenizer": str(TINY)}
    with LLM("gpt2", **settings, speculative_config=spec(folder, 2)) as llm:
        llm.generate([[5]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert counts_of(llm)["drafted"] > 0


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"hidden_size": 48}, "config.json: hidden_size is 48, and the target's 256: these heads are another model's"),
    ({}, {"vocab_size": 2049}, "vocab_size is 2049, and the target's 2048"),
    ({}, {"num_heads": "3"}, "num_heads must be a positive integer, not '3'"),
    ({}, {"num_heads": 10**6}, "1000000 heads of 1 layers are more than 128"),
    ({}, {"truncated_vocab_size": 3000}, "truncated_vocab_size 3000 is more"),
    ({}, {"logit_scale": []}, "logit_scale must be a number above 0"),
    ({}, {"medusa_fc_bias": 1}, "medusa_fc_bias must be true or false"),
    ({"num_speculative_tokens": 4}, {}, "num_speculative_tokens must be at most 3, a token for each head, not 4"),
    ({"model": "gpt2-tiny-heads"}, {}, "speculative_config: model 'gpt2-tiny-heads' is neither a folder"),
    ({"async_scheduling": True}, {}, "drafts follow from tokens that are not known yet"),
]


@pytest.mark.parametrize(("given", "config", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    given: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = {f"blocks.{head}.layers.0.weight": torch.zeros(256, 256) for head in range(HEADS)}
    tensors |= {f"lm_heads.{head}.weight": torch.zeros(VOCAB, 256) for head in range(HEADS)}
    folder = write(tmp_path / "heads", tensors, **config)
    settings = {key: given.pop(key) for key in list(given) if key == "async_scheduling"}
    with pytest.raises(StagesError, match=message) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(folder) | given, **settings)
    assert "\n" not in str(refused.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, learned: str) -> None:
    tensors = load_file(Path(learned) / "model.safetensors")
    broken: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
        "the checkpoint lacks 1 tensors: lm_heads.2.weight": ({k: v for k, v in tensors.items() if k != "lm_heads.2.weight"}, {}),
        "a tensor that the model does not know: blocks.0.layers.1.weight": (tensors | {"blocks.0.layers.1.weight": torch.zeros(256, 256)}, {}),
        "lm_heads.1.weight has shape .2, 256.": (tensors | {"lm_heads.1.weight": torch.zeros(2, 256)}, {}),
        "no token_map says which tokens": (tensors, {"truncated_vocab_size": 10}),
        "token_map must be 10 token ids below 2048": (tensors | {"token_map": torch.arange(2040, 2050)}, {"truncated_vocab_size": 10}),
    }  # fmt: skip
    for number, (message, (stored, config)) in enumerate(broken.items()):
        folder = write(tmp_path / str(number), stored, **config)
        with pytest.raises(StagesError, match=message):
            LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(folder))


def test_beside_a_folder_of_blocks(tmp_path: Path, plain: tuple[list[Any], int], learned: str) -> None:
    """They have no keys and values that such a folder would lack: the second engine finds the blocks of the first."""
    folder = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for _ in range(2):
        settings = COMMON | ROOMY | {"kv_transfer_config": folder, "prefix_caching_hash_seed": "seed"}
        with LLM("gpt2-tiny", **settings, speculative_config=spec(learned)) as llm:
            assert answers(llm) == plain[0]
            assert counts_of(llm)["accepted"] > 0
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("one_output_matrix", [False, True])
def test_the_plan_of_the_memory_counts_every_number(
    bias: bool, one_output_matrix: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"medusa_fc_bias": bias, "original_lm_head": one_output_matrix, "num_hidden_layers": 2}
    folder = write(tmp_path / "heads", {}, **config, truncated_vocab_size=100)
    given = ["--load-format", "dummy", "--speculative-config", json.dumps(spec(folder)), "--dtype", "float32"]
    engine = EngineArgs.from_kwargs(model="gpt2-tiny", load_format="dummy", speculative_config=spec(folder))
    heads = engine.speculative_config.draft_heads
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in MedusaHeads(**heads).parameters())
    assert num_parameters(heads) == count
    assert main(["serve", "gpt2-tiny", "--dry-run", *given]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "medusa_heads" in line]
    assert float(row[1]) == pytest.approx(4 * count / 2**20, abs=0.06) and row[2] == "MiB"
