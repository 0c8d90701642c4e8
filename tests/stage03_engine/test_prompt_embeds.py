"""Prompts that are embeddings: those of the model's own table give exactly the tokens that the ids give, whatever else the engine does."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import every_kind
import msgspec
import numpy as np
import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file, save
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
from stage03_engine.llm import LLM
from stage03_engine.params.embeds_file import layout_in_base64, layout_of
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32",
    "enable_prompt_embeds": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(5, 45)), [50], [7] * 33]
KINDS: list[dict[str, Any]] = [
    *every_kind.BACKENDS,
    {"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}, {"async_scheduling": True}, {"quantization": "int8"}, {"dtype": "bfloat16"},
    {"max_num_batched_tokens": 16, "max_num_seqs": 3}, {"num_gpu_blocks_override": 14, "block_size": 8}, {"enable_prefix_caching": False},
    {"num_gpu_blocks_override": 14, "block_size": 8, "swap_space": 0.01, "preemption_mode": "swap"}, {"batch_invariant": True}, {"kv_cache_dtype": "int8"},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}, {"enforce_eager": True},
    {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}}, {"scheduling_policy": "fair"},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("embeds") / "model", 2)


@pytest.fixture(scope="module")
def table(model: str) -> torch.Tensor:
    tensors = load_file(Path(model) / "model.safetensors")
    return next(tensor for name, tensor in tensors.items() if name.endswith("wte.weight"))


def given(table: torch.Tensor, ids: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], SamplingParams]:
    """A prompt of embeddings, as a program gives it."""
    return [0] * len(ids), msgspec.structs.replace(params, prompt_embeds=save({"x": table[ids].contiguous()}))


def run(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def name_of(kind: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in kind.items())


def odd_tensors(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """Of every number format and layout that torch has and a prompt cannot have -> why."""
    allowed = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        if dtype not in allowed:
            yield torch.empty(0, dtype=dtype).reshape(0, 8), "float32, float16 or bfloat16, not "
    for form in (rows.to_sparse(), rows.to_sparse_csr(), torch.nested.nested_tensor([rows, rows[:2]]), rows.to("meta")):
        yield form, "must be dense, and have values"


@pytest.mark.filterwarnings("ignore")  # torch's own, of formats that it will lose
def test_a_tensor_is_a_prompt(model: str, table: torch.Tensor) -> None:
    """As programs for vLLM write it, among others, and with the numbers in other formats and places."""
    with LLM(model, **SMALL) as llm:
        expected = [list(output.outputs[0].token_ids) for output in llm.generate([PROMPTS[1], PROMPTS[0]], GREEDY)]
        rows = table[PROMPTS[1]]
        forms = [rows, rows.T.contiguous().T, rows.clone().requires_grad_()]
        for form in forms:
            outputs = llm.generate([{"prompt_embeds": form, "cache_salt": "s"}, PROMPTS[0]], GREEDY)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        [alone] = llm.generate({"prompt_embeds": rows}, GREEDY)
        assert list(alone.outputs[0].token_ids) == expected[0] and alone.prompt is None
        for wrong, why in (
            ({"prompt_embeds": rows, "prompt": "x"}, "no 'prompt' beside them"),
            ({"prompt_embeds": rows.tolist()}, "this is no tensor, but list"),
            ({"prompt_embeds": rows[0]}, r"must have the shape \[num_tokens, hidden_size\]"),
            *(({"prompt_embeds": form}, why) for form, why in odd_tensors(rows)),
            ({"prompt_embeds": rows[:, :-1]}, "as the model's embeddings do"),
            ({"prompt_embeds": rows, "cache_salt": 3}, "may hold a cache_salt"),
        ):
            with pytest.raises(InvalidRequestError, match=why) as refused:
                llm.generate(wrong, GREEDY)
            assert "\n" not in str(refused.value)
        with pytest.raises(InvalidRequestError, match="only generate takes"):
            llm.beam_search([{"prompt_embeds": rows}], BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_tensor_is_a_prompt_on_an_event_loop(model: str, table: torch.Tensor) -> None:
    async def run() -> list[list[int]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **SMALL))
        try:
            answers = []
            for number, prompt in enumerate(({"prompt_embeds": table[PROMPTS[1]]}, {"prompt_token_ids": PROMPTS[1]})):
                outputs = [output async for output in engine.generate(prompt, GREEDY, f"r{number}")]
                answers.append(list(outputs[-1].outputs[0].token_ids))
            return answers
        finally:
            engine.shutdown()

    first, second = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert first == second


@pytest.mark.slow(
    keep=(
        "linear_backend=native",
        "preemption_mode=swap",
        "max_num_batched_tokens",
        "gpt2-tiny-draft",
        "ngram",
    )
)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_tables_own_rows_give_the_tokens_that_the_ids_give(
    model: str, table: torch.Tensor, kind: dict[str, Any]
) -> None:
    seeded = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True, n=2)
    chances = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    asked = [(ids, params) for ids in PROMPTS for params in (GREEDY, seeded, chances)]
    embeds = [given(table, ids, params) for ids, params in asked]
    with LLM(model, **SMALL | kind) as llm:
        expected = run(llm, asked)
        assert run(llm, embeds) == expected
        for alone in (6, 0):  # few tokens: a recorded step would not know of them
            assert run(llm, embeds[alone : alone + 1]) == expected[alone : alone + 1]
        mixed = [pair for each in zip(asked, embeds, strict=True) for pair in each]
        assert run(llm, mixed) == [tokens for tokens in expected for _ in range(2)]


def test_the_prefix_cache_knows_embeddings_by_their_numbers(model: str, table: torch.Tensor) -> None:
    one, other = list(range(5, 45)), list(range(6, 46))
    with LLM(model, **SMALL) as llm:
        expected = run(llm, [(one, GREEDY), (other, GREEDY), ([0] * 40, GREEDY)])
        assert expected[0] != expected[1]
        for ids, tokens in ((one, expected[0]), (other, expected[1])):
            first, second = (llm.generate([[0] * 40], [given(table, ids)[1]])[0] for _ in range(2))
            assert [list(first.outputs[0].token_ids)] == [list(second.outputs[0].token_ids)] == tokens
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        assert run(llm, [([0] * 40, GREEDY)]) == expected[2:]


def test_with_an_adapter(model: str, table: torch.Tensor, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", Path(model), seed=1)
    with LLM(model, **SMALL, enable_lora=True, lora_modules=(f"poet={adapter}",)) as llm:
        params = msgspec.structs.replace(GREEDY, lora="poet")
        [ids], [plain] = run(llm, [(PROMPTS[1], params)]), run(llm, [(PROMPTS[1], GREEDY)])
        assert run(llm, [given(table, PROMPTS[1], params)]) == [ids] != [plain]


@pytest.mark.slow
def test_after_sleep_and_after_new_weights(model: str, table: torch.Tensor) -> None:
    with LLM(model, **SMALL, enable_sleep_mode=True, enable_weight_updates=True) as llm:
        expected = run(llm, [given(table, PROMPTS[1])])
        llm.sleep(2)
        llm.wake_up()
        assert run(llm, [given(table, PROMPTS[1])]) == expected
        llm.update_weights(load_file(Path(model) / "model.safetensors").items())
        assert run(llm, [given(table, PROMPTS[1])]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_three_number_formats(model: str, table: torch.Tensor, dtype: torch.dtype) -> None:
    """Rows that are exact in each."""
    rows = (table[PROMPTS[1]] * 16).round() / 16
    with LLM(model, **SMALL) as llm:
        asked = [
            ([0] * 40, msgspec.structs.replace(GREEDY, prompt_embeds=save({"x": each})))
            for each in (rows, rows.to(dtype))
        ]
        first, second = run(llm, asked)
        assert first == second


def header(**changes: Any) -> bytes:
    """A file whose header says other things than it should."""
    tensor = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | changes
    text = json.dumps({"x": tensor}).encode()
    return len(text).to_bytes(8, "little") + text + np.zeros(8, np.float32).tobytes()


ODD = {
    "empty": (b"", "not a safetensors file"),
    "a pickle": (b"PK\x03\x04\0\0\0\0" + bytes(100), "not a safetensors file"),
    "a header of gigabytes": ((1 << 40).to_bytes(8, "little") + bytes(100), "not a safetensors file"),
    "no JSON": ((5).to_bytes(8, "little") + b"{{{{{" + bytes(32), "exactly one tensor"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "exactly one tensor"),
    "nested": ((4000).to_bytes(8, "little") + b"[" * 4000, "exactly one tensor"),
    "two tensors": (save({"x": torch.zeros(1, 4), "y": torch.zeros(1, 4)}), "exactly one tensor"),
    "integers": (save({"x": torch.zeros(1, 4, dtype=torch.int64)}), "must be float32, float16 or bfloat16, not I64"),
    "another kind of dtype": (header(dtype=["F32"]), "must be float32"),
    "one dimension": (save({"x": torch.zeros(4)}), r"the shape \[num_tokens, hidden_size\]"),
    "no token": (save({"x": torch.zeros(0, 4)}), r"the shape \[num_tokens, hidden_size\]"),
    "a negative size": (header(shape=[-2, -4]), "the shape"),
    "sizes that are no integers": (header(shape=[2.0, 4]), "the shape"),
    "true": (header(shape=[True, 8]), "the shape"),
    "a shape that is a number": (header(shape=7), "exactly one tensor"),
    "more than there is": (header(shape=[1 << 19, 4], data_offsets=[0, 1 << 23]), "must end after"),
    "a billion tokens": (header(shape=[1 << 30, 1], data_offsets=[0, 1 << 32]), "are more than"),
    "bytes behind it": (save({"x": torch.zeros(1, 4)}) + b"x", "must end after"),
    "a gap": (header(data_offsets=[4, 36]), "must end after"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_such_file_is_refused_in_one_line(what: str) -> None:
    file, why = ODD[what]
    with pytest.raises(InvalidRequestError, match=f"^prompt_embeds: .*{why}") as refused:
        layout_of(file, len(file))
    assert refused.value.param == "prompt_embeds" and "\n" not in str(refused.value)
    with pytest.raises(InvalidRequestError, match="^prompt_embeds: "):
        layout_in_base64("!" + file.hex())


def test_what_does_not_fit_the_model_or_the_request(model: str, table: torch.Tensor) -> None:
    with LLM(model, **SMALL) as llm:
        prompt, params = given(table, PROMPTS[1])
        rows = table[PROMPTS[1]]
        for tensor, why in (
            (rows[:, 1:], f"have {rows.shape[1]} numbers, .* not {rows.shape[1] - 1}"), (rows * float("nan"), "NaN or infinity"),
            (rows.half() * 1e9, "NaN or infinity"), ((rows * 1e38 * 1e9).bfloat16(), "NaN or infinity"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match=why):
                llm.generate(
                    [prompt], [msgspec.structs.replace(params, prompt_embeds=save({"x": tensor.contiguous()}))]
                )
        for wrong, why in (([5] * 40, "token 0 once for each row"), ([0] * 39, "40 embeddings beside 39 tokens")):
            with pytest.raises(InvalidRequestError, match=why):
                llm.generate([wrong], [params])
        for more in (
            {"repetition_penalty": 1.2},
            {"bad_words": ["x"]},
            {"prompt_logprobs": 1},
            {"truncate_prompt_tokens": 3},
        ):
            with pytest.raises(InvalidRequestError, match="cannot be combined with prompt_embeds"):
                llm.generate([prompt], [msgspec.structs.replace(params, **more)])
        assert run(llm, [(prompt, params)]) == run(llm, [(PROMPTS[1], GREEDY)])
    with (
        LLM(model, **SMALL | {"enable_prompt_embeds": False}) as llm,
        pytest.raises(InvalidRequestError, match="start the engine with --enable-prompt-embeds"),
    ):
        llm.generate([prompt], [params])
    with (
        LLM(model, **SMALL, pipeline_parallel_size=2) as llm,
        pytest.raises(InvalidRequestError, match="only token ids reach the first stage"),
    ):
        llm.generate([prompt], [params])


def test_the_trace_does_not_hold_them(model: str, table: torch.Tensor, tmp_path: Path) -> None:
    with LLM(model, **SMALL, trace=str(tmp_path)) as llm:
        run(llm, [given(table, PROMPTS[1])])
    [event] = read_run(tmp_path).named("embeds.given")
    assert event.args == {"num_tokens": 40, "dtype": "float16"}
    numbers = save({"x": table[PROMPTS[1]].contiguous()})[-300:]
    for form in (numbers, base64.b64encode(numbers)[:-4], numbers.hex().encode()):
        assert not any(form in file.read_bytes() for file in tmp_path.iterdir())
